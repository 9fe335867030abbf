"""A tiny random BERT with a word-piece vocabulary of letters and a few words, made in a moment."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

WORDS = (
    "the of capital is norway peru japan kenya chile nepal spain egypt rivers mountains lies on high are query passage"
)


def tiny_encoder_dir(path: Path, *, seed: int = 0, hidden_size: int = 32, classifier: bool = False) -> Path:
    """Write the model (an encoder, or a cross-encoder with one output) and its tokenizer; return the folder."""
    path.mkdir(parents=True)
    pieces = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *WORDS.split(),
        *pieces,
        *(f"##{piece}" for piece in pieces),
    ]
    (path / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)))
    tokenizer = BertTokenizerFast(vocab=str(path / "vocab.txt"))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = (BertForSequenceClassification if classifier else BertModel)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
