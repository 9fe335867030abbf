"""A supervised fine-tuning run around its loop: folder, checkpoints, progress, trackers."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from search_r1.data.sft_examples import SFTExample
from search_r1.errors import ConfigError
from search_r1.protocols import Metrics, Tracker
from search_r1.report.loss_plot import write_loss_plot
from search_r1.sft_config import SFTConfig
from search_r1.trainer.checkpoints import Checkpoints
from search_r1.trainer.run_folder import RunFolder
from search_r1.trainer.sft_loop import Learner, run_sft

_LINES_OF_PROGRESS = 20
"""Where there is no terminal."""


@dataclass(frozen=True, slots=True)
class _Trained:
    policy: Learner
    critic: None = None


class SFTRun:
    """Takes the steps of a plan from its beginning or from a checkpoint, and leaves a model in `output_dir`."""

    def __init__(
        self,
        config: SFTConfig,
        learner: Learner,
        examples: Sequence[SFTExample],
        validation: Sequence[SFTExample],
        plan: Sequence[Sequence[int]],
        trackers: Sequence[Tracker],
        save_tokenizer: Callable[[str], Any],
        console: Console,
    ) -> None:
        self.config = config
        self.learner = learner
        self.examples = examples
        self.validation = validation
        self.plan = plan
        self.trackers = trackers
        self.save_tokenizer = save_tokenizer
        self.console = console
        self.folder = RunFolder(Path(config.output_dir))
        self.checkpoints = Checkpoints(self.folder.checkpoints, config.trainer.keep_checkpoints)
        self._trained = _Trained(learner)
        self._plan_digest = _digest(plan, [*examples, *validation])
        self._done = 0
        self._stops = False
        self._seconds = 0.0
        self._progress = _progress(console)
        self._task = self._progress.add_task("sft", total=len(plan), loss=float("nan"))

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it was made of other data or batches, or with another model.
        """
        state = json.loads((path / "trainer.json").read_text())
        if state.get("plan") != self._plan_digest:
            raise ConfigError(
                f"the checkpoint {path} was made with other data or batches, so this run cannot go on from it: give "
                "the settings it was made with, or trainer.resume=never"
            )
        self.checkpoints.load(path, self._trained)
        self._done, self._seconds = int(state["step"]), state["train_seconds"]
        self._say(f"going on from {path}")

    def fit(self) -> dict[str, Any]:
        """Train to the last step; returns the summary that is also written to summary.json.

        Raises:
            TrainingError: too many non-finite steps in a row.
            KeyboardInterrupt: behind the step under way and its checkpoint, where checkpoints are written.
        """
        self.checkpoints.forget_after(self._done)
        self.folder.forget_after(self._done)
        self.folder.write_json("settings.json", fixed_settings(self.config))
        started = time.perf_counter() - self._seconds
        last: Metrics = {}

        def report(metrics: Metrics, step: int) -> None:
            self._seconds = time.perf_counter() - started
            last.update(metrics)
            self._report(metrics, step)

        with self._progress, self._stopping_between_steps():
            run_sft(
                self.learner, self.examples, self.validation, self.plan, self.config.training, report, self._done + 1
            )
        self.learner.save_pretrained(str(self.folder.path.resolve()))
        self.save_tokenizer(str(self.folder.path))
        write_loss_plot(self.folder.path)
        summary = self._summary(last)
        self.folder.write_json("summary.json", summary)
        return summary

    def _report(self, metrics: Metrics, step: int) -> None:
        self.folder.log_metrics(metrics, step)
        for tracker in self.trackers:
            tracker.log(metrics, step)
        self._progress.update(self._task, completed=step, loss=metrics["sft/loss"])
        if "validation/loss" in metrics:
            self._say(f"step {step}: validation loss {metrics['validation/loss']:.4f}")
        elif not self.console.is_terminal and step % max(1, len(self.plan) // _LINES_OF_PROGRESS) == 0:
            left = self._seconds * (len(self.plan) - step) / step
            loss = f"loss {metrics['sft/loss']:.4f}"
            self._say(f"step {step} of {len(self.plan)}: {loss}, {self._seconds:.0f} s, about {left:.0f} s left")
        every = self.config.trainer.save_every_steps
        stops = self._stops and step < len(self.plan)
        if stops or (every and step % every == 0):
            state = {"plan": self._plan_digest, "train_seconds": self._seconds}
            self.checkpoints.save(step, self._trained, state, self.save_tokenizer)
        if stops:
            raise KeyboardInterrupt

    @contextmanager
    def _stopping_between_steps(self) -> Iterator[None]:
        """Ctrl-C is heeded behind the step under way, so that its checkpoint is whole; a second one at once."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler or not self.config.trainer.save_every_steps:
            yield
            return

        def stop_soon(*_: object) -> None:
            self._stops = True
            signal.signal(signal.SIGINT, before)
            os.write(2, b"interrupted: stops with a checkpoint behind this step; once more stops at once\n")

        signal.signal(signal.SIGINT, stop_soon)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def _summary(self, last: Metrics) -> dict[str, Any]:
        return {
            "steps": len(self.plan),
            "examples": len(self.examples),
            "validation_examples": len(self.validation),
            "loss": last.get("sft/loss"),
            "validation_loss": last.get("validation/loss"),
            "train_seconds": round(self._seconds, 3),
        }


def _digest(plan: Sequence[Sequence[int]], examples: Sequence[SFTExample]) -> str:
    """Of the rows of every step and of what stands in them."""
    digest = hashlib.sha256(json.dumps(list(map(list, plan))).encode())
    for example in examples:
        digest.update(array("q", example.token_ids).tobytes() + bytes(example.loss_mask))
    return digest.hexdigest()


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def find_sft_resume(config: SFTConfig) -> Path | None:
    """The checkpoint to go on from; None starts anew.

    Raises:
        ConfigError: `output_dir` holds something else than an interrupted run of these settings (or, where the run
            starts anew, than a run), or `trainer.resume` names no checkpoint.
    """
    output, resume = Path(config.output_dir), config.trainer.resume
    if resume not in ("auto", "never") and not (Path(resume) / "trainer.json").is_file():
        raise ConfigError(f"trainer.resume={resume} is no checkpoint folder (…/checkpoints/step_000500)")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        settings = output / "settings.json"
        saved = json.loads(settings.read_text()) if settings.is_file() else {}
        if "training.batch_tokens" not in saved:
            raise ConfigError(f"output_dir={output} is not empty: give a new folder")
        if resume != "never" and (output / "summary.json").exists():
            raise ConfigError(
                f"output_dir={output} is not empty, it holds a finished run: give a new folder, or "
                "trainer.resume=never to write over it"
            )
    if resume == "never":
        return None
    if resume != "auto":
        return Path(resume)
    found = Checkpoints(output / "checkpoints", config.trainer.keep_checkpoints).all()
    if not found:
        return None
    _check_same(json.loads((output / "settings.json").read_text()), fixed_settings(config), output)
    return found[-1]


def _check_same(saved: dict[str, Any], now: dict[str, Any], output: Path) -> None:
    keys = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key))
    if keys:
        raise ConfigError(
            f"output_dir={output} holds an interrupted run with {keys[0]}={saved.get(keys[0])}, not "
            f"{now.get(keys[0])}: give the settings it was begun with, another folder, or trainer.resume=never"
        )


def fixed_settings(config: SFTConfig) -> dict[str, Any]:
    """Dotted keys of what decides the numbers: a run can go on only where they are equal."""
    training = config.training
    return {
        "seed": config.seed,
        **_dotted("model", asdict(config.model)),
        **_dotted("data", asdict(config.data)),
        **_dotted("optim", asdict(config.optim)),
        "training.epochs": training.epochs,
        "training.total_steps": training.total_steps,
        "training.batch_size": training.batch_size,
        "training.batch_tokens": training.batch_tokens,
    }


def _dotted(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        found |= _dotted(key, value) if isinstance(value, dict) else {key: json.loads(json.dumps(value))}
    return found
