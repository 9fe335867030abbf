"""Turn a checkpoint into a plain Hugging Face folder, which transformers and vLLM load: LoRA adapters are merged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from search_r1.errors import ConfigError, SearchR1Error

EXAMPLES = """\
examples:
  python -m search_r1.merge_adapter runs/mine/latest models/mine
  python -m search_r1.merge_adapter outputs/sft/checkpoints/step_000500 models/mine --dtype bfloat16
  python -m search_r1.merge_adapter adapter models/mine --base models/base"""
DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 after one sentence about what is wrong."""
    parser = argparse.ArgumentParser(
        prog="search_r1.merge_adapter",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", help="a run folder (its newest checkpoint is taken), a checkpoint, or a peft adapter; of RL or SFT"
    )
    parser.add_argument("output", help="a new folder for the model and its tokenizer")
    parser.add_argument("--base", default=None, help="the model an adapter was trained on, where it has moved")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: float32)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    options = parser.parse_args(arguments)
    try:
        merge(options.source, options.output, options.base, options.dtype, options.trust_remote_code)
        sys.stderr.write(f"wrote {options.output}\n")
    except SearchR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def merge(
    source: str, output: str, base: str | None = None, dtype: str = "float32", trust_remote_code: bool = False
) -> None:
    """Write a Hugging Face folder.

    Raises:
        ConfigError: nothing to merge, no base model, or an output folder that is not empty.
    """
    import torch

    from search_r1.backends.lora import ADAPTER_CONFIG, base_model_of, merge_into
    from search_r1.backends.model import check_model_folder, load_causal_lm, save_causal_lm
    from search_r1.backends.tokenizer import load_tokenizer
    from search_r1.config import ModelConfig

    if Path(output).exists() and (not Path(output).is_dir() or any(Path(output).iterdir())):
        raise ConfigError(f"{output} is not empty: give a new folder")
    folder = policy_folder(Path(source))
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if base and not is_adapter:
        raise ConfigError(f"{folder} holds a whole model, so --base={base} would have no effect: leave it out")
    if is_adapter:
        base = base or base_model_of(str(folder))
        try:
            check_model_folder(base)
        except ConfigError as error:
            raise ConfigError(f"{error}; --base names the model that the adapter in {folder} was trained on") from error
    model = load_causal_lm(base or str(folder), ModelConfig(trust_remote_code=trust_remote_code))
    model = (merge_into(model, str(folder)) if is_adapter else model).to(getattr(torch, dtype))
    save_causal_lm(model, model.state_dict(), output)
    own = any(folder.glob("tokenizer*"))
    load_tokenizer(str(folder) if own or not base else base, trust_remote_code).save_pretrained(output)


def policy_folder(source: Path) -> Path:
    """Where an adapter or a model lies: the folder itself, a checkpoint's policy, or a run's newest checkpoint's.

    Raises:
        ConfigError: there is none.
    """
    from search_r1.backends.model import find_policy

    if not source.is_dir():
        raise ConfigError(f"{source} does not exist: give a run folder, a checkpoint, or an adapter")
    if (folder := find_policy(source)) is not None:
        return folder
    raise ConfigError(
        f"{source} holds neither an adapter (adapter_config.json) nor a model (config.json): give a run folder, a "
        "checkpoint (…/checkpoints/step_000100), or its policy folder"
    )


if __name__ == "__main__":
    sys.exit(main())
