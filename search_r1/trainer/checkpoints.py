"""Checkpoints: everything needed to go on exactly, written whole or not at all."""

from __future__ import annotations

import json
import logging
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from search_r1.config import Config
from search_r1.errors import ConfigError
from search_r1.protocols import State
from search_r1.trainer.run_folder import is_held, refuse_held

logger = logging.getLogger(__name__)
_FREE_TO_CHANGE = ("run_dir", "environment", "cluster", "sharding", "trainer", "tracking", "validation", "engine")
"""Settings that a resumed run may have changed."""


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
    experiment if it was interrupted and its settings were the same.

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
        path = Path(resume)
        if not (path / "trainer.json").is_file():
            raise ConfigError(f"trainer.resume={resume} is no checkpoint folder (…/checkpoints/step_000100)")
        return run_path, path
    if not config.run_dir:
        latest = run_path.parent / "latest"
        if not latest.exists() or not _is_interrupted(latest, config):
            return run_path, None
        run_path = latest.resolve()
    found = Checkpoints(run_path / "checkpoints", config.trainer.keep_checkpoints).all()
    return run_path, found[-1] if found else None


def _is_interrupted(run_path: Path, config: Config) -> bool:
    settings = run_path / "settings.json"
    if (run_path / "summary.json").exists() or not settings.is_file() or is_held(run_path):
        return False
    return bool(json.loads(settings.read_text()) == comparable(config))


def changed_settings(checkpoint: Path, config: Config) -> list[str]:
    """What differs from the run that wrote `checkpoint`, one `key: old -> new` each."""
    file = Path(checkpoint).parents[1] / "settings.json"
    if not file.is_file():
        return []
    old, new = _flat(json.loads(file.read_text())), _flat(comparable(config))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def comparable(config: Config) -> dict[str, Any]:
    """The settings that must be equal for a run to go on where another stopped."""
    kept = {name: value for name, value in asdict(config).items() if name not in _FREE_TO_CHANGE}
    result: dict[str, Any] = json.loads(json.dumps(kept))
    return result
