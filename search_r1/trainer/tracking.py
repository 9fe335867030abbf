"""Where metrics go besides metrics.jsonl: wandb and tensorboard. The console is `trainer/console.py`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from search_r1.config import TrackingConfig
from search_r1.errors import ConfigError
from search_r1.protocols import Metrics, Tracker


class WandbTracker:
    """Weights & Biases; WANDB_MODE=offline works without a network."""

    def __init__(self, config: TrackingConfig, run_path: Path, settings: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: wandb is not installed, knows no account, or cannot be reached.
        """
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ImportError as error:
            raise _not_installed("wandb", error) from error
        run_path.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.run_name or run_path.name,
                dir=str(run_path),
                config=settings,
                resume="allow",
                id=run_id(run_path),
            )
        except WandbError as error:
            raise ConfigError(
                f"tracking.backends has wandb, which does not start ({' '.join(str(error).split())[:300]}): run "
                "`wandb login`, set WANDB_MODE=offline, or leave it out"
            ) from error

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """The run counts as failed where an exception is on its way out."""
        self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)


class TensorboardTracker:
    def __init__(self, run_path: Path) -> None:
        """
        Raises:
            ConfigError: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("tensorboard", error) from error
        self._new_writer = SummaryWriter
        self._folder = str(run_path / "tensorboard")
        self._writer: SummaryWriter | None = None

    def log(self, metrics: Metrics, step: int) -> None:
        """What an earlier part of the run logged at the first of these steps or later is hidden."""
        if self._writer is None:
            self._writer = self._new_writer(self._folder, purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def run_id(run_path: Path) -> str:
    """The same for a folder each time, and another for a folder of that name elsewhere."""
    return f"{run_path.name}-{hashlib.sha256(str(run_path.resolve()).encode()).hexdigest()[:8]}"


def _not_installed(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"tracking.backends has {name}, which does not import ({error}): pip install {name}")


def build_trackers(config: TrackingConfig, run_path: Path, settings: dict[str, Any]) -> list[Tracker]:
    """One tracker a chosen backend; `settings` is the redacted configuration.

    Raises:
        ConfigError: a backend is not installed or does not start.
    """
    trackers: list[Tracker] = []
    if "tensorboard" in config.backends:
        trackers.append(TensorboardTracker(run_path))
    if "wandb" in config.backends:
        trackers.append(WandbTracker(config, run_path, settings))
    return trackers
