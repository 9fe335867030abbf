"""The tool example through the normal entry points: demonstrations, SFT, then GRPO with real search, both executors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.tools import build as example
from retriever_server.app import create_app
from retriever_server.bm25 import BM25Retriever
from retriever_server.corpus import Corpus
from search_r1.data.sft_examples import ConversationEncoder
from search_r1.evaluate import main as evaluate
from search_r1.main import main
from search_r1.sft import main as sft
from tests.live_server import live_server
from tests.serving import metrics_rows

FIT = ("optim.name=muon", "optim.lr=2e-2", "training.total_steps=100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions, and a small model that learned to answer them by heart, calls and all."""
    path = tmp_path_factory.mktemp("tools")
    example.build(path, num_demonstrations=64)
    tokenizer = AutoTokenizer.from_pretrained(path / "untrained")
    example.untrained_model(tokenizer, num_layers=2).save_pretrained(path / "untrained")
    rng = random.Random(0)
    bridges = example.Bridges(random.Random(example.SEED), example.NUM_BRIDGES)
    run = example.make_runner(bridges, path / "corpus.jsonl")
    tasks = [example.make_task(rng, kind, bridges.opened) for kind in ("arithmetic", "opening")]
    rows = [example.demonstration_row(task, example.demonstrate(task, run)) for task in tasks]
    example.write_json_lines(path / "learned.jsonl", rows)
    example.write_questions(path / "learned.parquet", tasks, "train")
    data = (f"model.path={path}/untrained", f"data.train_files=[{path}/learned.jsonl]", f"output_dir={path}/sft")
    assert sft([*data, *FIT]) == 0
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    retriever = BM25Retriever.build(Corpus.open(folder / "corpus.jsonl"))
    with live_server(create_app(retriever)) as address:
        yield address


def arguments(folder: Path, url: str, *overrides: str) -> list[str]:
    return [
        "experiment=tools",
        f"model.path={folder}/sft",
        f"data.train_files=[{folder}/learned.parquet]",
        f"data.val_files=[{folder}/learned.parquet]",
        f"environment.retriever_urls=[{url}]",
        "data.train_batch_size=2",
        "rollout.group_size=3",
        "policy.mini_batch_size=2",
        "trainer.total_steps=1",
        "tracking.backends=[]",
        f"run_dir={folder}/run",
        *overrides,
    ]


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(folder: Path, url: str) -> Path:
    assert main(arguments(folder, url)) == 0
    return folder / "run"


def test_a_model_learns_the_calls_by_sft_and_uses_them_in_grpo(trained: Path) -> None:
    before, step = metrics_rows(trained)[:2]
    assert before["val/em"] == 1.0
    assert before["val/tools/search/calls"] == before["val/tools/calculator/calls"] == 1
    assert step["rollout/num_trajectories"] == 6
    assert step["tools/search/calls"] + step["tools/calculator/calls"] > 0
    rows = records(trained / "trajectories" / "step_000001.jsonl")
    calls = [call for row in rows for turn in row["turns"] for call in turn["calls"]]
    assert {"tool", "status", "seconds"} == set(calls[0])


def test_what_sft_learns_is_token_by_token_what_a_rollout_holds(folder: Path, trained: Path) -> None:
    encode = ConversationEncoder(AutoTokenizer.from_pretrained(folder / "untrained"))
    learned = [encode(row["messages"]) for row in records(folder / "learned.jsonl")]
    rolled = [row for row in records(trained / "trajectories" / "val_000000.jsonl") if row["reward"] == 1.0]
    assert len(rolled) == 2
    sequences = {example.token_ids: example.loss_mask for example in learned}
    for row in rolled:
        mask = sequences[tuple(row["token_ids"])]
        sampled = [any(start <= i < end for start, end in row["sampled_spans"]) for i in range(len(mask))]
        assert list(mask) == sampled


def evaluated(folder: Path, url: str, name: str, *overrides: str) -> list[dict[str, Any]]:
    kept = [word for word in arguments(folder, url) if not word.startswith(("run_dir", "data.train_files"))]
    assert evaluate([*kept, *overrides, "--output", f"{folder}/{name}"]) == 0
    return records(folder / name / "questions.jsonl")


def test_langgraph_gives_the_same_greedy_trajectories(folder: Path, url: str, trained: Path) -> None:
    executors = ("plain", "langgraph")
    plain, through = (evaluated(folder, url, name, f"environment.executor={name}") for name in executors)
    assert [row["token_ids"] for row in plain] == [row["token_ids"] for row in through]
    assert [len(row["turns"]) for row in plain] == [2, 2]


@pytest.mark.vllm
def test_vllm_and_its_asynchronous_schedule_give_the_same_greedy_trajectories(folder: Path, url: str) -> None:
    hf, vllm = (evaluated(folder, url, name, f"engine={name}") for name in ("hf", "vllm"))
    assert [row["token_ids"] for row in hf] == [row["token_ids"] for row in vllm]
    assert [len(row["turns"]) for row in vllm] == [2, 2]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.tools=[nowhere.tools]"], "'nowhere.tools' does not import"),
        (["environment.tools=[]"], "names 'calculator', which is not registered"),
        (["rollout.max_obs_length=20"], "max_obs_length=20 is too small"),
        (["rollout.end_on_eos=true"], "set it to false"),
        (["environment.retriever_urls=[]"], "names 'search', which is not registered"),
    ],
)
def test_bad_settings_end_with_one_sentence_before_anything_is_written(
    folder: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], words: str
) -> None:
    assert main(arguments(folder, url, *overrides, f"run_dir={tmp_path}/run")) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()
