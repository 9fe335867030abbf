"""Turn a LoRA checkpoint into a plain model: `python -m search_r1.merge_adapter CHECKPOINT/policy FOLDER`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from search_r1.errors import ConfigError, SearchR1Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 after one sentence about what is wrong."""
    parser = argparse.ArgumentParser(prog="search_r1.merge_adapter", description=__doc__)
    parser.add_argument("adapter", help="a checkpoint's policy folder (adapter_config.json, adapter_model.safetensors)")
    parser.add_argument("output", help="a new folder for the merged model and its tokenizer")
    parser.add_argument("--base", default=None, help="the model it was trained on, where it has moved")
    options = parser.parse_args(arguments)
    try:
        merge(options.adapter, options.output, options.base)
    except SearchR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def merge(adapter: str, output: str, base: str | None = None) -> None:
    """Write a Hugging Face folder.

    Raises:
        ConfigError: no adapter, no base model, or an output folder that is not empty.
    """
    from search_r1.backends.lora import base_model_of, merge_into
    from search_r1.backends.model import load_causal_lm, save_causal_lm
    from search_r1.backends.tokenizer import load_tokenizer
    from search_r1.config import ModelConfig

    if Path(output).exists() and any(Path(output).iterdir()):
        raise ConfigError(f"{output} is not empty: give a new folder")
    base = base or base_model_of(adapter)
    model = merge_into(load_causal_lm(base, ModelConfig()), adapter)
    save_causal_lm(model, model.state_dict(), output)
    load_tokenizer(base).save_pretrained(output)


if __name__ == "__main__":
    sys.exit(main())
