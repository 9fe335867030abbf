"""What every tracker promises: each number arrives under its name and step, whatever it is."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from search_r1.config import TrackingConfig
from search_r1.errors import ConfigError
from search_r1.protocols import Metrics, Tracker
from search_r1.trainer.run_folder import RunFolder
from search_r1.trainer.tracking import build_trackers, run_id

History = dict[int, Metrics]


class MetricsFile:
    """metrics.jsonl, which every run writes."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)

    def log(self, metrics: Metrics, step: int) -> None:
        self.folder.log_metrics(metrics, step)

    def close(self) -> None:
        pass


def read_jsonl(path: Path) -> History:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {row.pop("step"): row for row in rows}


def read_tensorboard(path: Path) -> History:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    history: History = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            history.setdefault(event.step, {})[name] = event.value
    return history


def read_wandb(path: Path) -> History:
    """wandb's service may write the end of a run a moment after it was closed."""
    from wandb.proto.wandb_internal_pb2 import Record

    def read() -> list[Record]:
        (file,) = path.glob("wandb/offline-run-*/*.wandb")
        return [Record.FromString(data) for data in log_records(file.read_bytes())]

    deadline = time.monotonic() + 30
    while not any(record.WhichOneof("record_type") == "exit" for record in read()):
        assert time.monotonic() < deadline, "the run has no end"
        time.sleep(0.01)
    history: History = {}
    for record in read():
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if row:
            history[row["_step"]] = {name: float(value) for name, value in row.items() if not name.startswith("_")}
    return history


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log, the form of an offline wandb run: blocks of 32 KiB, pieces behind 7 bytes of header."""
    at, record = 7, b""
    while at + 7 <= len(data):
        room = -at % 32_768
        if 0 < room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<4xHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


READERS: dict[str, Callable[[Path], History]] = {
    "jsonl": read_jsonl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
}


@pytest.fixture(params=READERS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return str(request.param)


def make(backend: str, path: Path) -> Tracker:
    path.mkdir(exist_ok=True)
    if backend == "jsonl":
        return MetricsFile(path)
    config = TrackingConfig(backends=(backend,))  # type: ignore[arg-type]
    (tracker,) = build_trackers(config, path, {"seed": 0, "model": {"path": "m"}})
    return tracker


def test_every_number_arrives_under_its_name_and_step(backend: str, tmp_path: Path) -> None:
    logged: History = {
        0: {"val/em": 0.25, "val/questions": 600.0},
        1: {"reward/mean": 0.5, "actor/loss": -1e-9, "time/step_s": 1234.5},
        2: {"reward/mean": 1.0, "actor/loss": math.nan, "actor/grad_norm": math.inf, "count": 3},
        40: {"reward/mean": 0.0},
    }
    tracker = make(backend, tmp_path / "run")
    for step, metrics in logged.items():
        tracker.log(metrics, step)
    tracker.close()
    found = READERS[backend](tmp_path / "run")
    assert found.keys() == logged.keys()
    for step, metrics in logged.items():
        assert found[step] == pytest.approx(metrics, rel=1e-6, nan_ok=True)


def test_a_run_that_is_taken_up_again_adds_to_what_was_logged(backend: str, tmp_path: Path) -> None:
    """An offline wandb run keeps its parts in folders of their own; one name makes them one run when uploaded."""
    for step in (1, 2):
        tracker = make(backend, tmp_path / "run")
        tracker.log({"reward/mean": float(step)}, step)
        tracker.close()
        if backend == "wandb":
            assert READERS[backend](tmp_path / "run") == {step: {"reward/mean": float(step)}}
            (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-run-*.wandb")
            file.parent.rename(tmp_path / f"part-{step}")
    if backend != "wandb":
        assert READERS[backend](tmp_path / "run") == {1: {"reward/mean": 1.0}, 2: {"reward/mean": 2.0}}


def test_a_backend_that_was_not_chosen_leaves_nothing(tmp_path: Path) -> None:
    assert build_trackers(TrackingConfig(backends=("console",)), tmp_path, {}) == []
    assert list(tmp_path.iterdir()) == []


def test_steps_that_are_taken_again_replace_those_of_before_in_tensorboard(tmp_path: Path) -> None:
    for steps, value in (((1, 2, 3), 0.0), ((2,), 1.0)):
        tracker = make("tensorboard", tmp_path / "run")
        for step in steps:
            tracker.log({"reward/mean": value}, step)
        tracker.close()
    assert read_tensorboard(tmp_path / "run") == {1: {"reward/mean": 0.0}, 2: {"reward/mean": 1.0}}


def test_runs_of_one_name_in_two_places_are_two_runs(tmp_path: Path) -> None:
    assert run_id(tmp_path / "a" / "run") != run_id(tmp_path / "b" / "run")
    assert run_id(tmp_path / "a" / "run") == run_id(tmp_path / "b" / ".." / "a" / "run")


def test_wandb_without_an_account_is_told_with_its_remedy(tmp_path: Path) -> None:
    """In a process of its own: wandb remembers the mode of its first run."""
    code = (
        "from pathlib import Path; import search_r1.trainer.tracking as t\n"
        "try: t.build_trackers(t.TrackingConfig(backends=('wandb',)), Path('.'), {})\n"
        "except t.ConfigError as error: print(error)\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    own = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    env = kept | own | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "run `wandb login`, set WANDB_MODE=offline" in told.stdout, told.stderr


@pytest.mark.parametrize("module", ["wandb", "torch.utils.tensorboard"])
def test_a_backend_that_is_not_installed_is_named(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    name = module.rpartition(".")[2]
    with pytest.raises(ConfigError, match=f"tracking.backends has {name}.*pip install {name}"):
        make(name, tmp_path / "run")
