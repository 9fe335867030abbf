"""Builds everything in this folder from one seed: `python -m examples.quickstart.build [--stage data|model|all]`.

`data` takes seconds: the corpus and the questions into the output folder; demonstrations, tokenizer and an untrained
model into the work folder. `model` takes half an hour on two cores: the model learns to read, then from clean, then
from sloppy demonstrations.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from examples.quickstart.demonstrations import (
    CLEAN,
    SLOPPY,
    Search,
    answered_right,
    make_demonstrations,
    make_reading_rows,
    untagged,
)
from examples.quickstart.questions import ask, sample_riddles
from examples.quickstart.tokenizer import train_tokenizer
from examples.quickstart.world import Size, World, make_world
from retriever_server.bm25 import BM25Retriever
from retriever_server.corpus import Corpus
from search_r1.backends.model import load_causal_lm, save_causal_lm
from search_r1.config import ModelConfig
from search_r1.prompts import prompt_messages
from search_r1.types import Passage

logger = logging.getLogger(__name__)

SEED = 2025
TOP_K = 2
TRAIN_SIZE = Size(people=390, towns=195, companies=195, books=230, distractors=290)
TEST_SIZE = Size(people=210, towns=105, companies=105, books=120, distractors=160)
NUM_TRAIN, NUM_TEST = 2000, 600
DEMONSTRATION_WORLDS, READING_PER_WORLD, CLEAN_PER_WORLD, SLOPPY_PER_WORLD = 10, 2000, 2000, 500
VOCAB_SIZE = 1024

NUM_VALIDATION = 256

STAGES = {
    "reading": ("training.total_steps=1000", "training.batch_tokens=3072", "optim.lr=2e-3"),
    "clean": ("training.total_steps=900", "training.batch_tokens=2048", "optim.lr=1.5e-3"),
    "sloppy": ("training.total_steps=250", "training.batch_tokens=2048", "optim.lr=1e-3"),
}
"""The stages of fine-tuning, each going on from the one before, and their settings."""
SHARED_SETTINGS = (
    "model.dtype=bfloat16",
    "optim.name=muon",
    "optim.betas=[0.9,0.98]",
    "optim.warmup_ratio=0.05",
    "training.validate_every_steps=100",
)
"""Small batches: what is learned here, to copy, takes steps rather than tokens."""


def build_worlds() -> tuple[World, World]:
    """The part of the encyclopedia that training questions are about, and the part for the test: no shared name."""
    train = make_world(SEED, TRAIN_SIZE)
    return train, make_world(SEED + 1, TEST_SIZE, train.words)


def build_data(output: Path, work: Path) -> None:
    train, test = build_worlds()
    write_corpus(output / "corpus.jsonl", [*train.passages, *test.passages])
    write_questions(output / "train.parquet", train, NUM_TRAIN, "train")
    write_questions(output / "test.parquet", test, NUM_TEST, "test")
    parts = dict(zip(STAGES, build_demonstrations(work, train.words | test.words), strict=True))
    for name, rows in parts.items():
        _write_json_lines(work / f"{name}.jsonl", rows[NUM_VALIDATION:])
        _write_json_lines(work / f"{name}_val.jsonl", rows[:NUM_VALIDATION])
    tokenizer = train_tokenizer(_texts(parts["clean"][::5]), VOCAB_SIZE)
    tokenizer.save_pretrained(work / "untrained")
    untrained_model(tokenizer).save_pretrained(work / "untrained")


def build_demonstrations(work: Path, forbidden: frozenset[str]) -> tuple[list[dict[str, Any]], ...]:
    """Reading practice, clean and sloppy rows, shuffled, over worlds of their own whose names nobody meets again.

    Each has its own random numbers, so that a change to one leaves the others as they are.
    """
    rngs = [random.Random(f"{SEED}/{stage}") for stage in STAGES]
    reading: list[dict[str, Any]] = []
    clean: list[dict[str, Any]] = []
    sloppy: list[dict[str, Any]] = []
    for i in range(DEMONSTRATION_WORLDS):
        world = make_world(SEED + 100 + i, TRAIN_SIZE, forbidden)
        search = make_search(world, work / "demonstration_corpus.jsonl")
        reading += make_reading_rows(rngs[0], world, search, READING_PER_WORLD, forbidden)
        rows = make_demonstrations(rngs[1], world, search, CLEAN_PER_WORLD, CLEAN, forbidden)
        clean += [row for row in rows if answered_right(row)]
        sloppy += make_demonstrations(rngs[2], world, search, SLOPPY_PER_WORLD, SLOPPY, forbidden)
    reading += [untagged(row["messages"]) for row in clean]
    for rng, rows in zip(rngs, (reading, clean, sloppy), strict=True):
        rng.shuffle(rows)
    right = sum(answered_right(row) for row in sloppy) / len(sloppy)
    logger.info("%d clean demonstrations; %d sloppy ones, %.3f of them right", len(clean), len(sloppy), right)
    return reading, clean, sloppy


def make_search(world: World, file: Path) -> Search:
    """What the retrieval server would find in a corpus of this world alone."""
    write_corpus(file, world.passages)
    retriever = BM25Retriever.build(Corpus.open(file))
    return lambda query: [Passage(*world.passages[row]) for row, _ in retriever.rank(query, TOP_K)]


def write_corpus(file: Path, passages: Sequence[tuple[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": str(i), "contents": f"{title}\n{text}"} for i, (title, text) in enumerate(passages)]
    _write_json_lines(file, rows)


def write_questions(file: Path, world: World, count: int, split: str) -> None:
    """Parquet in the schema that training reads, as many one-hop as two-hop questions, shuffled."""
    rng = random.Random(f"{SEED}/{split}")
    riddles = sample_riddles(rng, world, count)
    rng.shuffle(riddles)
    rows = []
    for index, riddle in enumerate(riddles):
        source = "quickstart_one_hop" if len(riddle.path) == 1 else "quickstart_two_hop"
        question = ask(rng, riddle)
        rows.append(
            {
                "id": f"{source}/{split}/{index}",
                "question": question,
                "data_source": source,
                "prompt": list(prompt_messages("short", question)),
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": [riddle.answer]}},
                "extra_info": {"split": split, "index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), file)


def untrained_model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """Two million parameters, random."""
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def build_model(output: Path, work: Path) -> None:
    start = "untrained"
    for name in STAGES:
        fine_tune(work, start, name)
        start = name
    model = load_causal_lm(str(work / start), ModelConfig()).half()
    save_causal_lm(model, model.state_dict(), str(output / "model"))
    AutoTokenizer.from_pretrained(work / start).save_pretrained(output / "model")


def fine_tune(work: Path, start: str, name: str) -> None:
    """Train `work/start` on `work/name.jsonl` into `work/name`."""
    command = [sys.executable, "-m", "search_r1.sft", f"model.path={work / start}", f"output_dir={work / name}"]
    files = [f"data.train_files=[{work / name}.jsonl]", f"data.val_files=[{work / name}_val.jsonl]"]
    subprocess.run([*command, *files, f"seed={SEED}", *SHARED_SETTINGS, *STAGES[name]], check=True)


def _texts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the tokenizer learns from: the messages and the names of their roles, as the chat template shows them."""
    texts: list[str] = []
    for row in rows:
        for message in row["messages"]:
            texts += [f"{message['role']}\n", message["content"]]
    return texts


def _write_json_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--work", type=Path, default=Path("outputs/quickstart"), help="intermediate files")
    parser.add_argument("--stage", choices=("data", "model", "all"), default="all")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.work.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.stage in ("data", "all"):
        build_data(args.output, args.work)
    if args.stage in ("model", "all"):
        build_model(args.output, args.work)


if __name__ == "__main__":
    main()
