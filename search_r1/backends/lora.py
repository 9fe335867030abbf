"""Low-rank adapters (LoRA, arXiv:2106.09685) in the linear layers of a frozen model.

An adapted layer computes `x W' + (alpha / rank) x A' B'`; only A and B are trained. With the adapters off the module is
the model it started from, which makes it its own reference. Nothing else imports peft.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from search_r1.config import LoraConfig, ModelConfig
from search_r1.errors import ConfigError
from search_r1.protocols import Weights

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_ADAPTER = "default"
_PREFIX = "base_model.model."
"""Of tensor names in a peft folder."""


def attach_lora(lm: PreTrainedModel, config: LoraConfig) -> PreTrainedModel:
    """Freeze the model and put adapters into its target layers, in place; they change nothing until trained.

    Raises:
        ConfigError: no target, or one that names no linear layer, or the output head.
    """
    _check_targets(lm, config)
    from peft import inject_adapter_in_model

    inject_adapter_in_model(_peft_config(config), lm, adapter_name=_ADAPTER)
    return lm


def _peft_config(config: LoraConfig, base_path: str | None = None) -> Any:
    from peft import LoraConfig as PeftConfig

    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_path,
    )


def _check_targets(lm: PreTrainedModel, config: LoraConfig) -> None:
    if isinstance(config.targets, str):
        return
    head = lm.get_output_embeddings()
    linear = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head]
    names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
    if not config.targets:
        raise ConfigError(f"model.lora.targets=[] names no layer to adapt: name some of {names} (or all-linear)")
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ConfigError(
                f"model.lora.targets: {target} names no linear layer of {type(lm).__name__}; there are {names} (or "
                "all-linear)"
            )


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside it the module computes with its base weights alone."""
    from peft.tuners.lora import LoraLayer

    layers = [child for child in module.modules() if isinstance(child, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(weights: Weights, config: LoraConfig) -> Weights:
    """An adapted model's weights as the plain model's: `W + (alpha / rank) B A`, under its names and in its order.

    The layers' own weights stay as they are; one merged matrix exists at a time.
    """
    scale = config.alpha / config.rank
    base: tuple[str, Tensor] | None = None
    factor: Tensor | None = None
    bias: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        if name.endswith(".base_layer.weight"):
            base = name.replace(".base_layer.", "."), tensor
        elif name.endswith(".base_layer.bias"):
            bias = [(name.replace(".base_layer.", "."), tensor)]
        elif ".lora_A." in name:
            factor = tensor
        elif ".lora_B." in name:
            assert base is not None, f"{name} stands before its base weight"
            assert factor is not None, f"{name} stands before its other half"
            yield base[0], base[1] + scale * (tensor @ factor)
            yield from bias
            base, factor, bias = None, None, []
        else:
            yield name, tensor


def save_adapter(folder: str, adapter: dict[str, Tensor], model: ModelConfig) -> None:
    """Write the two files peft reads, from `adapter_only` of a causal language model."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    base_path = os.path.abspath(model.path) if os.path.isdir(model.path) else model.path
    _peft_config(model.lora, base_path).save_pretrained(folder)
    named = {_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor for name, tensor in adapter.items()}
    save_file(named, Path(folder) / _WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.copymode(Path(folder) / ADAPTER_CONFIG, Path(folder) / _WEIGHTS_FILE)  # else nobody else may read them


def load_adapter(folder: str, config: LoraConfig) -> dict[str, Tensor]:
    """The adapters `save_adapter` wrote, under the module's names.

    Raises:
        ConfigError: no adapter there, or one of another rank or scale.
    """
    file = Path(folder) / ADAPTER_CONFIG
    if not file.is_file():
        raise ConfigError(
            f"{folder} holds no adapter ({ADAPTER_CONFIG}) but model.lora.rank={config.rank}: it was trained without "
            "LoRA; set model.lora.rank=0, or model.path to this folder to put adapters on it"
        )
    saved = json.loads(file.read_text())
    for key, here, there in (("rank", config.rank, saved["r"]), ("alpha", config.alpha, saved["lora_alpha"])):
        if here != there:
            raise ConfigError(f"the adapter in {folder} has {key} {there}, not {here}: set model.lora.{key}={there}")
    tensors = load_file(Path(folder) / _WEIGHTS_FILE)
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    return {name.replace(".weight", f".{_ADAPTER}.weight"): tensor for name, tensor in named.items()}


def merge_into(base: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The plain model that `base` with the adapter of `folder` is."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, folder).merge_and_unload()


def base_model_of(folder: str) -> str:
    """Where the model an adapter was trained on lies.

    Raises:
        ConfigError: no adapter there.
    """
    file = Path(folder) / ADAPTER_CONFIG
    if not file.is_file():
        raise ConfigError(f"{folder} holds no adapter ({ADAPTER_CONFIG}): give the policy folder of a LoRA checkpoint")
    return str(json.loads(file.read_text())["base_model_name_or_path"])
