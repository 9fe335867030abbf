"""Tiny random models of each supported architecture, with a small byte-level BPE tokenizer, made in a moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = ("qwen2", "qwen3", "llama", "smollm2")
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Punctuation takes the line breaks that follow it, so that ">" and "\n" merge into one token as they do in Qwen's.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _training_texts() -> Iterator[str]:
    for number in range(200):
        word = _LETTERS[number % 26] + _LETTERS[number * 7 % 26] + _LETTERS[number * 3 % 26]
        yield f"<think>\nWho wrote {word}?\n</think>\n<search> the author of {word} </search>\n"
        yield f"<information>\nDoc 1(Title: {word}) The town of {word} lies in {number}.\n</information>\n"
        yield f"<answer> {word} {number} </answer>\nQuestion: where is {word} from? user assistant system Tōkyō"


@cache
def tiny_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows the tags as ordinary text, with a ChatML template; pad is eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _training_texts(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(architecture: str = "qwen2", *, tied: bool = True, max_length: int = 512, **overrides: Any) -> Any:
    """A Hugging Face config: width 64, 2 layers, 2 heads over 1 key/value head, float32."""
    tokenizer = tiny_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    model_type = "llama" if architecture == "smollm2" else architecture
    return AutoConfig.for_model(model_type, **{**settings, **overrides})


def tiny_model(architecture: str = "qwen2", *, tied: bool = True, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in evaluation mode whose next-token distributions are far from uniform."""
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, tied=tied, **overrides), dtype=torch.float32)
    randomize(model, seed)
    return model.eval()


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every matrix and bias anew; norms stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)


def tiny_model_dir(
    path: Path, architecture: str = "qwen2", *, tied: bool = True, seed: int = 0, **overrides: Any
) -> Path:
    """Write `tiny_model` and `tiny_tokenizer` as a Hugging Face folder and return its path."""
    tiny_model(architecture, tied=tied, seed=seed, **overrides).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def scripted_model(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Overwrite an untied model so that greedy decoding follows `token_ids` from the first one, none of them twice.

    Attention and feed-forward add nothing; the head of each token answers to the embedding of the one before it.
    """
    assert len(set(token_ids)) == len(token_ids), "a script may use a token once only"
    randomize(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        for before, after in pairwise(token_ids):
            head[after] = 3 * embeddings[before] / embeddings[before].std()
