"""Checkpoints: everything needed to go on exactly, written whole or not at all."""

from __future__ import annotations

import json
import logging
import random
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from search_r1.config import Config, EngineConfig
from search_r1.errors import ConfigError
from search_r1.protocols import State
from search_r1.trainer.run_folder import is_held, refuse_held

logger = logging.getLogger(__name__)
_FREE_TO_CHANGE = frozenset(
    {
        *("run_dir", "cluster", "sharding", "trainer", "tracking"),
        *("model.gradient_checkpointing", "policy.max_tokens_per_micro_batch", "critic.max_tokens_per_micro_batch"),
        *("policy.offload_while_generating", "rollout.max_concurrent_searches", "rollout.max_void_share"),
        *("validation.before_training", "validation.every_steps"),
        *(f"engine.{key.name}" for key in fields(EngineConfig) if key.name not in ("name", "dtype")),
        *("environment.retriever_urls", "environment.timeout_s", "environment.max_retries"),
        *("environment.max_queries_per_request", "environment.gather_ms"),
        *("environment.tool_timeout_s", "environment.max_concurrent_tools"),
    }
)
"""Keys, or whole sections, that a resumed run may have changed. They decide neither tokens nor rewards nor the model:
where and how fast it runs, for how long, and what may go wrong before it stops."""


class Kept(Protocol):
    """What writes and reads its own folder: a policy, a critic."""

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


class Trained(Protocol):
    """`Roles`, or anything else that is trained."""

    @property
    def policy(self) -> Kept: ...

    @property
    def critic(self) -> Kept | None: ...


class Checkpoints:
    """checkpoints/step_000010/{policy/, critic/, trainer.json, rng.pt}; `policy/` is a Hugging Face folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, roles: Trained, state: State, save_tokenizer: Any) -> Path:
        """Write the checkpoint of `step` and delete the oldest beyond `keep`."""
        target, temporary = self.folder / f"step_{step:06d}", self.folder / f".step_{step:06d}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        roles.policy.save(str((temporary / "policy").resolve()))
        save_tokenizer(str(temporary / "policy"))
        if roles.critic:
            roles.critic.save(str((temporary / "critic").resolve()))
        torch.save({"torch": torch.get_rng_state(), "python": random.getstate()}, temporary / "rng.pt")
        (temporary / "trainer.json").write_text(json.dumps({"step": step, **state}, indent=2))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)
        return target

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step_*") if (p / "trainer.json").is_file())

    def forget_after(self, step: int) -> None:
        """Delete checkpoints of steps that a run will take again."""
        for old in self.all():
            if int(old.name.removeprefix("step_")) > step:
                shutil.rmtree(old)

    def load(self, path: Path, roles: Trained) -> State:
        """Bring policy and critic to where the checkpoint was; returns the trainer's part."""
        roles.policy.load(str((path / "policy").resolve()))
        if roles.critic:
            if not (path / "critic").is_dir():
                raise ConfigError(f"checkpoint {path} has no critic: it was made without algorithm.advantage=gae")
            roles.critic.load(str((path / "critic").resolve()))
        rng = torch.load(path / "rng.pt", weights_only=True)
        torch.set_rng_state(rng["torch"])
        version, internal, gauss = rng["python"]
        random.setstate((version, tuple(internal), gauss))
        state: State = json.loads((path / "trainer.json").read_text())
        return state


def find_resume(config: Config, new_path: Path) -> tuple[Path, Path | None]:
    """The run folder to work in, and the checkpoint to start from.

    `auto` with `run_dir` goes on from that folder's newest checkpoint; without `run_dir`, from the newest run of the
    experiment if it was interrupted and its settings were the same (`comparable`).

    Raises:
        ConfigError: `trainer.resume` names no checkpoint, or another run is writing to the folder, or a run that
            starts anew would have to delete what is in it.
    """
    run_path = Path(config.run_dir) if config.run_dir else new_path
    refuse_held(run_path)
    resume = config.trainer.resume
    if resume == "never":
        if old := Checkpoints(run_path / "checkpoints", config.trainer.keep_checkpoints).all():
            raise ConfigError(
                f"run_dir={run_path} holds a run with a checkpoint of {old[-1].name}, and trainer.resume=never would "
                "write over it: name another run_dir, delete that one, or go on from it with trainer.resume=auto"
            )
        return run_path, None
    if resume != "auto":
        path = Path(resume).resolve()
        if not (path / "trainer.json").is_file():
            raise ConfigError(f"trainer.resume={resume} is no checkpoint folder (…/checkpoints/step_000100)")
        return run_path, path
    if not config.run_dir:
        latest = run_path.parent / "latest"
        if not latest.exists() or not _is_interrupted(latest.resolve(), config):
            return run_path, None
        run_path = latest.resolve()
    found = Checkpoints(run_path / "checkpoints", config.trainer.keep_checkpoints).all()
    return run_path, found[-1] if found else None


def _is_interrupted(run_path: Path, config: Config) -> bool:
    if (run_path / "summary.json").exists() or not (run_path / "settings.json").is_file() or is_held(run_path):
        return False
    changes = changed_settings(run_path, config)
    if changes:
        logger.warning("a new run begins: the interrupted %s has other settings: %s", run_path, ", ".join(changes))
    return not changes


def changed_settings(run_path: Path, config: Config) -> list[str]:
    """What differs from the settings of the run in that folder, one `key: old -> new` each.

    A key that its settings.json lacks was free to change, or not there, when they were written: it counts as equal.
    """
    file = run_path / "settings.json"
    old, new = _flat(json.loads(file.read_text()) if file.is_file() else {}), comparable(config)
    return [f"{key}: {old[key]} -> {new[key]}" for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        if name not in _FREE_TO_CHANGE:
            flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def comparable(config: Config) -> dict[str, Any]:
    """Dotted keys of the settings that must be equal for a run to go on where another stopped."""
    fixed = _flat(asdict(config)) | {"environment.has_retriever": bool(config.environment.retriever_urls)}
    result: dict[str, Any] = json.loads(json.dumps(fixed))
    return result
