"""Supervised fine-tuning on Ray workers: the losses and the model of a run in one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from search_r1 import sft
from tests.model_factory import tiny_model_dir

pytestmark = pytest.mark.usefixtures("local_ray")
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Seven conversations of many lengths, in batches of three: a worker is sometimes left without one."""
    folder = tmp_path_factory.mktemp("sft")
    answers = [f"<answer> {'abc ' * (1 + 5 * i)}</answer>" for i in range(7)]
    rows = [[{"role": "user", "content": "who?"}, {"role": "assistant", "content": answer}] for answer in answers]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return [
        f"model.path={tiny_model_dir(folder / 'start')}",
        f"data.train_files=[{folder}/rows.jsonl]",
        "data.val_size=1",
        "training.batch_size=3",
        "training.epochs=3",
        "training.max_tokens_per_micro_batch=128",
        "training.validate_every_steps=3",
        "trainer.save_every_steps=2",
        "trainer.keep_checkpoints=9",
        "optim.lr=1e-3",
    ]


def run(arguments: list[str], folder: Path, *overrides: str) -> list[dict[str, float]]:
    assert sft.main([*arguments, f"output_dir={folder}", *overrides]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_alike(first: list[dict[str, float]], second: list[dict[str, float]]) -> None:
    for expected, row in zip(first, second, strict=True):
        assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


RAY = ("cluster.launcher=ray", "cluster.num_workers=2")


def assert_same_model(first: Path, second: Path) -> None:
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < TOLERANCE


def test_adapters_learn_alike_in_one_process_and_over_two_workers(arguments: list[str], tmp_path: Path) -> None:
    lora = ("model.lora.rank=4", "optim.lr=1e-2")
    alone, shared = run(arguments, tmp_path / "alone", *lora), run(arguments, tmp_path / "shared", *lora, *RAY)
    assert len(alone) == 6
    assert_alike(alone, shared)
    assert_same_model(tmp_path / "alone", tmp_path / "shared")


def test_a_run_sharded_over_two_workers_is_that_of_one_process_which_can_take_it_over(
    arguments: list[str], tmp_path: Path
) -> None:
    whole = run(arguments, tmp_path / "whole", *RAY, "sharding.name=fsdp2")
    assert_alike(whole, run(arguments, tmp_path / "alone"))
    assert_same_model(tmp_path / "whole", tmp_path / "alone")
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step_000004", killed / "checkpoints" / "step_000004")
    for name in ("settings.json", "metrics.jsonl"):
        shutil.copy(tmp_path / "whole" / name, killed / name)
    assert_alike(whole, run(arguments, killed))
