"""Loading models: the only place that calls `from_pretrained` for weights that are trained."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from search_r1.backends.lora import ADAPTER_CONFIG, attach_lora, is_adapter
from search_r1.backends.packing import VARLEN
from search_r1.backends.tokenizer import TOKENIZER_FILES
from search_r1.config import Config, LoraConfig, ModelConfig
from search_r1.data.micro_batches import SequenceCost
from search_r1.data.model_size import ModelSize
from search_r1.errors import ConfigError

logger = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()

_SCALED_LOGITS = ("logits_scaling", "logit_scale")
"""Config fields of models whose logits are not `hidden @ head.T`."""
_VOCABULARY_UNIT = 64
"""vLLM pads a vocabulary to a multiple of it."""


def attention_implementation(config: ModelConfig, device: str) -> str:
    """transformers' name; `auto` takes a ragged kernel where there is one: in bfloat16 on CUDA."""
    if config.attention != "auto":
        return VARLEN if config.attention == "varlen" else config.attention
    if device != "cuda" or config.dtype != "bfloat16":
        return "sdpa"
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") is not None else VARLEN


def attends_ragged(model: PreTrainedModel) -> bool:
    """Its attention takes packed sequences without a mask."""
    return model.config._attn_implementation in ("flash_attention_2", VARLEN)


def check_model_folder(path: str, *, with_tokenizer: bool = True) -> None:
    """Refuse what can be seen to be no model before anything heavy starts.

    Raises:
        ConfigError: a folder without config.json, weights or tokenizer, or a path that is neither folder nor hub name.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
            raise ConfigError(
                f"model folder {path} does not exist: model.path takes a Hugging Face folder or a hub name"
            )
        return
    if (found := find_policy(folder)) is not None:
        refuse_adapter(str(found))
        if found != folder:
            raise ConfigError(f"{path} holds a training run, not a model: give the model of its checkpoint, {found}")
    needed = [
        ("config.json", ("config.json",), "is this a Hugging Face model folder?"),
        ("weights", ("*.safetensors",), "save the model with save_pretrained (safetensors)"),
        ("tokenizer", TOKENIZER_FILES, "save the tokenizer beside the model with tokenizer.save_pretrained"),
    ]
    for what, patterns, remedy in needed if with_tokenizer else needed[:2]:
        if not any(file for pattern in patterns for file in folder.glob(pattern)):
            raise ConfigError(f"model folder {path} has no {what} ({', '.join(patterns)}): {remedy}")


def find_policy(source: Path) -> Path | None:
    """The folder itself where it holds a model or an adapter, a checkpoint's policy, or a run's newest checkpoint's."""
    newest_first = sorted(source.glob("checkpoints/step_*/policy"), reverse=True)
    for folder in (source, source / "policy", *newest_first):
        if (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
            return folder
    return None


def refuse_adapter(path: str) -> None:
    if (Path(path) / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{path} holds a LoRA adapter, not a model: `python -m search_r1.merge_adapter {path} FOLDER` merges it; "
            "to go on training it, set the model.lora.rank it has"
        )


def load_causal_lm(path: str, config: ModelConfig, device: str = "cpu", *, empty: bool = False) -> PreTrainedModel:
    """A causal language model with float32 weights in host memory, its attention chosen for `device`.

    Args:
        empty: Make it on the meta device instead, without weights.

    Raises:
        ConfigError: not loadable, or of an architecture whose logits are not a plain product with the output head.
    """
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": attention_implementation(config, device),
        "trust_remote_code": config.trust_remote_code,
    }
    try:
        if empty:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(_auto_config(path, config.trust_remote_code), **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ConfigError(f"cannot load a causal language model from {path}: {str(error).splitlines()[0]}") from error
    _refuse_scaled_logits(model.config, path)
    if getattr(model.config, "attn_logit_softcapping", None) and model.config._attn_implementation in ("sdpa", VARLEN):
        raise ConfigError(f"{path} caps its attention logits, which SDPA cannot: set model.attention=eager")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.use_cache = False
    return model


def load_trainable_lm(path: str, config: ModelConfig, device: str, *, empty: bool = False) -> PreTrainedModel:
    """As `load_causal_lm`, without dropout, with adapters where `model.lora` asks for them."""
    lm = load_causal_lm(path, config, device, empty=empty)
    disable_dropout(lm)
    return attach_lora(lm, config.lora) if config.lora.rank else lm


def check_fits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str, what: str) -> None:
    """Refuse weights of another architecture.

    Raises:
        ConfigError: with the first names that are missing, unknown or of another shape.
    """
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in expected]
    wrong += [
        f"{name} has shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if wrong:
        raise ConfigError(
            f"the checkpoint in {where} does not fit {what} ({'; '.join(wrong[:3])}, {len(wrong)} in all): it was made "
            "with another model; give the model.path it was made with, or start anew with trainer.resume=never"
        )


def sequence_cost(path: str, trust_remote_code: bool = False) -> SequenceCost:
    """Multiplications of a forward pass in units of one token's matrix products, from a model's config alone."""
    size = model_size(path, trust_remote_code)
    return SequenceCost(1.0, size.layers * size.attention_width / max(size.parameters - size.embeddings, 1))


def role_sizes(config: Config, with_reference: bool) -> dict[str, ModelSize]:
    """Of the models that a run holds beside the engine's."""
    model = config.model
    sizes = {"policy": model_size(model.path, model.trust_remote_code, model.lora)}
    if with_reference and not shares_base(model):
        sizes["reference"] = model_size(model.reference_path or model.path, model.trust_remote_code)
    if config.algorithm.advantage == "gae":
        sizes["critic"] = model_size(model.critic_path or model.path, model.trust_remote_code, model.lora)
    return sizes


def shares_base(config: ModelConfig) -> bool:
    """The policy with its adapters off is the reference."""
    return config.lora.rank > 0 and config.reference_path in (None, config.path)


def model_size(path: str, trust_remote_code: bool = False, lora: LoraConfig | None = None) -> ModelSize:
    """Counted on the meta device: no weights are read or made."""
    config = _auto_config(path, trust_remote_code)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        if lora is not None and lora.rank:
            attach_lora(lm, lora)
    adapters = sum(p.numel() for name, p in lm.named_parameters() if is_adapter(name))
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    return ModelSize(
        parameters=sum(p.numel() for p in lm.parameters()) - adapters,
        embeddings=sum(p.numel() for p in {lm.get_input_embeddings().weight, lm.get_output_embeddings().weight}),
        adapters=adapters,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        attention_width=heads * (head_dim or config.hidden_size // heads),
    )


def _refuse_scaled_logits(model_config: Any, path: str) -> None:
    for name in _SCALED_LOGITS:
        if getattr(model_config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"{path} scales its logits ({name}), which the log-prob code does not support")


def context_window(path: str, trust_remote_code: bool = False) -> int:
    """`max_position_embeddings` of a model, read from its config alone."""
    return int(getattr(_auto_config(path, trust_remote_code), "max_position_embeddings", 1 << 30))


def check_tensor_parallel(path: str, size: int, trust_remote_code: bool = False) -> None:
    """
    Raises:
        ConfigError: vLLM cannot deal the model to `size` GPUs.
    """
    config = _auto_config(path, trust_remote_code)
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    vocabulary = -(-int(config.vocab_size) // _VOCABULARY_UNIT) * _VOCABULARY_UNIT

    def fits(size: int) -> bool:
        return heads % size == vocabulary % size == 0 and 0 in (shared % size, size % shared)

    if not fits(size):
        fitting = ", ".join(str(count) for count in range(1, min(heads, 16) + 1) if fits(count))
        raise ConfigError(
            f"engine.tensor_parallel_size={size} does not divide what {path} has, {heads} attention heads over "
            f"{shared} key/value heads and a vocabulary of {vocabulary:,} with padding: set it to one of {fitting}"
        )


def _auto_config(path: str, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config of {path}: {str(error).splitlines()[0]}") from error


def save_causal_lm(model: PreTrainedModel, state_dict: dict[str, Tensor], path: str) -> None:
    """Write a plain Hugging Face folder from full weights; older readers find `rope_theta` where they look for it.

    Tied weights are written once, also where gathering made a copy for each of their names.
    """
    tied = set(model.all_tied_weights_keys)
    model.save_pretrained(path, state_dict={name: t for name, t in state_dict.items() if name not in tied})
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope and "rope_theta" not in config:
        config["rope_theta"] = rope["rope_theta"]
        file.write_text(json.dumps(config, indent=2) + "\n")
    for weights in Path(path).glob("*.safetensors"):  # written as a temporary file that nobody else may read
        shutil.copymode(file, weights)


def disable_dropout(module: nn.Module) -> None:
    """Dropout would make old and new log-probs differ by chance. Attention layers keep its share as a plain number."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        for name, value in vars(child).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(child, name, 0.0)
