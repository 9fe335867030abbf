"""Where metrics go besides metrics.jsonl: wandb and tensorboard. The console is `trainer/console.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_r1.config import TrackingConfig
from search_r1.protocols import Metrics, Tracker


class WandbTracker:
    """Weights & Biases; WANDB_MODE=offline works without a network."""

    def __init__(self, config: TrackingConfig, run_path: Path, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project,
            name=config.run_name or run_path.name,
            dir=str(run_path),
            config=settings,
            resume="allow",
            id=run_path.name,
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardTracker:
    def __init__(self, run_path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_path / "tensorboard"))

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def build_trackers(config: TrackingConfig, run_path: Path, settings: dict[str, Any]) -> list[Tracker]:
    """One tracker a chosen backend; `settings` is the redacted configuration."""
    trackers: list[Tracker] = []
    if "wandb" in config.backends:
        trackers.append(WandbTracker(config, run_path, settings))
    if "tensorboard" in config.backends:
        trackers.append(TensorboardTracker(run_path))
    return trackers
