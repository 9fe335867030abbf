"""A real retrieval server in a process of its own, and a tiny training run that talks to it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from search_r1.types import Trajectory
from tests.model_factory import tiny_model_dir

CAPITALS = {"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Japan": "Tokyo", "Kenya": "Nairobi", "Cuba": "Havana"}


@contextmanager
def retrieval_server(folder: Path, *arguments: str) -> Iterator[str]:
    """URL of a server over a corpus of capitals."""
    corpus, port_file = folder / "corpus.jsonl", folder / "port"
    rows = [
        {"id": country, "contents": f'"{city}"\n{city} is the capital of {country}.'}
        for country, city in CAPITALS.items()
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "retriever_server", "--corpus", str(corpus), "--port", "0"]
    process = subprocess.Popen([*command, "--port-file", str(port_file), *arguments], stderr=subprocess.DEVNULL)
    try:
        while not (port_file.exists() and port_file.read_text().strip()):
            assert process.poll() is None, f"the server ended with {process.returncode}"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}/retrieve"
    finally:
        process.terminate()
        process.wait(timeout=20)


def write_questions(path: Path, num_rows: int = 6) -> Path:
    """Questions about capitals in the RL schema."""
    rows = [
        {
            "data_source": "capitals_a" if number % 2 else "capitals_b",
            "prompt": [{"role": "user", "content": f"capital of {country}?"}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [city]}},
            "extra_info": {"split": "train", "index": number},
        }
        for number, (country, city) in enumerate(list(CAPITALS.items())[:num_rows])
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def tiny_run(folder: Path, url: str, *overrides: str) -> list[str]:
    """Arguments of search_r1.main for a run that takes seconds: a random model, three questions a step."""
    model = folder / "model"
    if not model.exists():
        tiny_model_dir(model)
    data = write_questions(folder / "questions.parquet")
    settings = {
        "model.path": str(model),
        "data.train_files": f"[{data}]",
        "data.val_files": f"[{data}]",
        "data.train_batch_size": 3,
        "data.val_batch_size": 4,
        "rollout.group_size": 2,
        "rollout.max_turns": 1,
        "rollout.max_start_length": 64,
        "rollout.max_response_length": 12,
        "rollout.max_obs_length": 96,
        "rollout.max_prompt_length": 200,
        "engine.name": "hf",
        "environment.retriever_urls": f"[{url}]",
        "reward.function": "tests.serving:vowel_share",
        "policy.mini_batch_size": 2,
        "policy.optim.lr": 1e-3,
        "policy.optim.warmup_ratio": 0,
        "critic.mini_batch_size": 2,
        "cluster.launcher": "local",
        "trainer.total_steps": 4,
        "trainer.save_every_steps": 1,
        "trainer.keep_checkpoints": 10,
        "tracking.backends": "[]",
        "run_dir": str(folder / "run"),
    }
    return [f"{key}={value}" for key, value in settings.items()] + list(overrides)


def vowel_share(trajectory: Trajectory) -> dict[str, float]:
    """A reward with spread even for a random model: the share of vowels in what it wrote."""
    text = "".join(turn.completion.text for turn in trajectory.turns)
    share = sum(text.count(vowel) for vowel in "aeiou") / max(len(text), 1)
    return {"reward": share, "length": float(len(text))}


def metrics_rows(run: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]
