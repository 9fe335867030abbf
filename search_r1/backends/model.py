"""Loading models: the only place that calls `from_pretrained` for weights that are trained."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from search_r1.config import ModelConfig
from search_r1.errors import ConfigError

logger = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()

_SCALED_LOGITS = ("logits_scaling", "logit_scale")
"""Config fields of models whose logits are not `hidden @ head.T`."""


def attention_implementation(requested: str, device: str) -> str:
    """`auto` becomes flash-attn on CUDA where it is installed, else SDPA."""
    if requested != "auto":
        return requested
    has_flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash else "sdpa"


def check_model_folder(path: str) -> None:
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
    for what, pattern, remedy in (
        ("config.json", "config.json", "is this a Hugging Face model folder?"),
        ("weights", "*.safetensors", "save the model with save_pretrained (safetensors)"),
        ("tokenizer", "tokenizer*", "save the tokenizer beside the model with tokenizer.save_pretrained"),
    ):
        if not any(folder.glob(pattern)):
            raise ConfigError(f"model folder {path} has no {what} ({pattern}): {remedy}")


def load_causal_lm(path: str, config: ModelConfig, device: str = "cpu") -> PreTrainedModel:
    """A causal language model with float32 weights, no dropout.

    Raises:
        ConfigError: not loadable, or of an architecture whose logits are not a plain product with the output head.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention_implementation(config.attention, device),
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a causal language model from {path}: {str(error).splitlines()[0]}") from error
    _refuse_scaled_logits(model.config, path)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.use_cache = False
    return model.to(device)


def _refuse_scaled_logits(model_config: Any, path: str) -> None:
    for name in _SCALED_LOGITS:
        if getattr(model_config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"{path} scales its logits ({name}), which the log-prob code does not support")


def context_window(path: str, trust_remote_code: bool = False) -> int:
    """`max_position_embeddings` of a model, read from its config alone."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config of {path}: {str(error).splitlines()[0]}") from error
    return int(getattr(config, "max_position_embeddings", 1 << 30))


def save_causal_lm(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], path: str) -> None:
    """Write a plain Hugging Face folder from full weights; older readers find `rope_theta` where they look for it."""
    model.save_pretrained(path, state_dict=state_dict)
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope and "rope_theta" not in config:
        config["rope_theta"] = rope["rope_theta"]
        file.write_text(json.dumps(config, indent=2) + "\n")


def disable_dropout(module: nn.Module) -> None:
    """Dropout would make old and new log-probs differ by chance."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
