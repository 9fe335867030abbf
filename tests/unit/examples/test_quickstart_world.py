"""The quick start's encyclopedia: nothing asked in the test can be known from training."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from examples.quickstart import build
from examples.quickstart.demonstrations import (
    CLEAN,
    SLOPPY,
    Habits,
    answered_right,
    make_demonstrations,
    make_reading_rows,
)
from examples.quickstart.questions import all_riddles, sample_riddles
from examples.quickstart.tokenizer import train_tokenizer
from examples.quickstart.world import World
from search_r1.data.questions import load_questions
from search_r1.rollout.actions import parse_search_action
from search_r1.types import Completion, Passage, Question

FOLDER = Path(build.__file__).parent
_WORD = re.compile(r"[A-Z][a-z]+")


@cache
def bundled(split: str) -> list[Question]:
    return load_questions([str(FOLDER / f"{split}.parquet")])


@cache
def corpus() -> dict[str, str]:
    rows = [json.loads(line) for line in (FOLDER / "corpus.jsonl").read_text().splitlines()]
    return {row["id"]: row["contents"] for row in rows}


def words(texts: list[str]) -> set[str]:
    train, test = build.build_worlds()
    return set(_WORD.findall(" ".join(texts))) & (train.words | test.words)


def test_the_bundled_files_are_what_the_seed_builds(tmp_path: Path) -> None:
    train, test = build.build_worlds()
    build.write_corpus(tmp_path / "corpus.jsonl", [*train.passages, *test.passages])
    assert (tmp_path / "corpus.jsonl").read_text() == (FOLDER / "corpus.jsonl").read_text()
    for world, split, count in ((train, "train", build.NUM_TRAIN), (test, "test", build.NUM_TEST)):
        build.write_questions(tmp_path / f"{split}.parquet", world, count, split)
        assert pq.read_table(tmp_path / f"{split}.parquet").equals(pq.read_table(FOLDER / f"{split}.parquet"))


def test_no_name_of_a_test_question_its_bridge_or_its_answer_occurs_in_a_training_question() -> None:
    train, test = build.build_worlds()
    assert not train.words & test.words
    train_texts = [text for q in bundled("train") for text in (q.text, *q.golden_answers)]
    test_texts = [text for q in bundled("test") for text in (q.text, *q.golden_answers)]
    assert words(train_texts) <= train.words
    assert words(test_texts) <= test.words
    assert {e.name for e in test.entities.values()}.isdisjoint(train.entities)
    assert all(_WORD.search(name) and words([name]) for name in test.entities), "a title without an invented name"


def test_bridges_of_test_questions_lie_in_the_test_world_too() -> None:
    _, test = build.build_worlds()
    for riddle in sample_riddles(random.Random(0), test, 200):
        assert words(list(riddle.entities)) <= test.words


def test_no_name_of_the_encyclopedia_occurs_in_a_demonstration() -> None:
    train, test = build.build_worlds()
    world = build.make_world(78, build.TEST_SIZE, train.words | test.words)
    reading = make_reading_rows(
        random.Random(6), world, lambda query: _search(world, query), 200, train.words | test.words
    )
    rows = [*_demonstrations(CLEAN), *_demonstrations(SLOPPY), *reading]
    texts = [message["content"] for row in rows for message in row["messages"]]
    assert not words(texts)
    assert len(train.words | test.words) > 1000


def test_questions_are_half_one_hop_half_two_hop_and_asked_once() -> None:
    for split, count in (("train", build.NUM_TRAIN), ("test", build.NUM_TEST)):
        sources = Counter(question.data_source for question in bundled(split))
        assert sources == {"quickstart_one_hop": count // 2, "quickstart_two_hop": count // 2}
        asked = Counter((q.text, q.golden_answers) for q in bundled(split))
        assert max(asked.values()) == 1
    assert len(bundled("test")) >= 500


def test_every_answer_is_found_by_searching_for_the_names_along_the_way(tmp_path: Path) -> None:
    train, test = build.build_worlds()
    build.write_corpus(tmp_path / "corpus.jsonl", [*train.passages, *test.passages])
    whole = build.Corpus.open(tmp_path / "corpus.jsonl")
    retriever = build.BM25Retriever.build(whole)
    passages = [*train.passages, *test.passages]
    riddles = sample_riddles(random.Random(1), test, 400)
    found = 0
    for riddle in riddles:
        subjects = [riddle.subject, *riddle.steps[:-1]]
        found += all(
            any(passages[row][0] == subject for row, _ in retriever.rank(subject, build.TOP_K)) for subject in subjects
        )
    assert found / len(riddles) > 0.97


def _search(world: World, query: str) -> list[Passage]:
    """The passage whose title the query names, else one that it does not."""
    named = [Passage(title, text) for title, text in world.passages if title in query]
    return (named or [Passage(*world.passages[len(query)])])[:2]


def _demonstrations(habits: Habits, count: int = 400) -> list[dict[str, Any]]:
    train, test = build.build_worlds()
    forbidden = train.words | test.words
    world = build.make_world(77, build.TEST_SIZE, forbidden)
    return make_demonstrations(random.Random(5), world, lambda query: _search(world, query), count, habits, forbidden)


def test_clean_demonstrations_answer_right_and_sloppy_ones_mostly_do_not() -> None:
    for habits, low, high in ((CLEAN, 0.99, 1.0), (SLOPPY, 0.15, 0.5)):
        rows = _demonstrations(habits)
        assert low <= sum(map(answered_right, rows)) / len(rows) <= high


def test_a_demonstration_is_a_sequence_of_turns_the_environment_understands() -> None:
    for row in _demonstrations(SLOPPY):
        turns = re.split(r"\n\n<information>.*?</information>\n\n", row["messages"][1]["content"], flags=re.DOTALL)
        actions = [parse_search_action(Completion((), (), turn, "stop").text) for turn in turns]
        assert [a.kind for a in actions] == ["search"] * (len(turns) - 1) + ["answer"]
        assert all(a.content for a in actions)


def test_every_riddle_of_two_hops_passes_over_an_entity_of_the_same_world() -> None:
    _, test = build.build_worlds()
    for riddle in all_riddles(test, 2):
        assert test.entities[riddle.subject].facts[riddle.path[0]] == riddle.steps[0]
        assert test.entities[riddle.steps[0]].facts[riddle.path[1]] == riddle.answer


def test_tags_are_ordinary_text_to_the_tokenizer_and_loading_it_changes_nothing(tmp_path: Path) -> None:
    text = "<think> a </think> <search> Bb born </search>\n\n<information>c 1847.</information>\n\n<answer> d </answer>"
    tokenizer = train_tokenizer([text, "user\n", "assistant\n"], 300)
    tokenizer.save_pretrained(tmp_path)
    build.untrained_model(tokenizer).config.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert loaded.decode(ids, skip_special_tokens=True) == text
    assert set(loaded.all_special_tokens) == {"<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"}


def test_every_token_of_the_bundled_tokenizer_has_an_embedding() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    assert len(tokenizer) <= AutoConfig.from_pretrained(FOLDER / "model").vocab_size


def test_the_bundled_folder_stays_small() -> None:
    total = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert total < 8_000_000
    assert len(corpus()) == 2000
