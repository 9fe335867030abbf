"""Dataset rows to questions, in every form of the RL schema that is about; and the order they are asked in."""

from __future__ import annotations

import glob
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_r1.errors import ConfigError, DataError
from search_r1.prompts import check_template, prompt_messages
from search_r1.types import Question

logger = logging.getLogger(__name__)
ANSWER_SEPARATOR = "<|answer_split|>"
_COLUMNS = (
    "id", "question", "golden_answers", "data_source", "prompt", "reward_model", "extra_info", "split", "tools"
)  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool")
_NUM_MEASURED = 2000
"""Prompts whose length is looked at before a run."""


def load_questions(files: str | Sequence[str], template: str = "dataset", limit: int | None = None) -> list[Question]:
    """Read questions from parquet or JSON-lines files of the RL schema.

    Golden answers are taken from `reward_model.ground_truth` (a mapping with `target`, a list, or one string joined by
    `<|answer_split|>`), else from a `golden_answers` column. Leftover columns are not read.

    Args:
        files: paths or glob patterns; a file matched twice is read once.
        template: `dataset` keeps the prompt column, a name from prompts.py renders the bare question anew.
        limit: stop after so many questions.

    Raises:
        DataError: a missing, unreadable or empty file, or a row without prompt or answers; file and row are named.
        ConfigError: no such template.
    """
    check_template(template, also=("dataset",))
    questions: list[Question] = []
    taken: set[str] = set()
    for path in _expand([files] if isinstance(files, str) else files):
        number = 0
        for number, row in enumerate(_rows(path), start=1):
            if limit is not None and len(questions) >= limit:
                return questions
            question = _question(row, path, number, template, taken)
            taken.add(question.question_id)
            questions.append(question)
        if number == 0:
            raise DataError(f"{path}: the file holds no questions")
    return questions


def golden_answers(value: Any) -> tuple[str, ...]:
    """Answers out of any of the shapes they are stored in: stripped, in order, empty ones dropped."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = value.get("target")
        return golden_answers(value)
    if value is None:
        return ()
    if isinstance(value, str):
        value = value.split(ANSWER_SEPARATOR)
    elif not isinstance(value, Iterable):
        value = [value]
    stripped = (str(answer).strip() for answer in value if answer is not None)
    return tuple(answer for answer in stripped if answer)


def spread(questions: Sequence[Question], count: int | None) -> list[Question]:
    """At most `count` questions in their order: evenly spaced in each source, so that sources keep their shares."""
    if count is None or count >= len(questions):
        return list(questions)
    sources = {source: i for i, source in enumerate(dict.fromkeys(question.data_source for question in questions))}
    by_source = sorted(range(len(questions)), key=lambda i: sources[questions[i].data_source])
    return [questions[i] for i in sorted(by_source[index * len(questions) // count] for index in range(count))]


def check_prompt_lengths(
    questions: Sequence[Question], encode_prompt: Callable[[Question], Sequence[int]], limit: int
) -> None:
    """Measure the prompts, or a sample of many, and warn where some are longer than `limit` tokens.

    Raises:
        ConfigError: all of them are.
    """
    lengths = [len(encode_prompt(question)) for question in spread(questions, _NUM_MEASURED)]
    num_long = sum(length > limit for length in lengths)
    if lengths and num_long == len(lengths):
        raise ConfigError(
            f"rollout.max_start_length={limit} is below the length of every prompt ({min(lengths)} tokens and more): "
            "nothing would be rolled out; raise it, and rollout.max_prompt_length with it"
        )
    if num_long:
        logger.warning(
            "%d of %d prompts are longer than rollout.max_start_length=%d tokens (the longest has %d): nothing is "
            "generated for them", num_long, len(lengths), limit, max(lengths),
        )  # fmt: skip


class QuestionStream:
    """An endless, seeded and resumable order of questions.

    Every epoch has its own permutation and shows each question exactly once. Batches run across the border of two
    epochs, so nothing is dropped and every batch is full.
    """

    def __init__(self, questions: Sequence[Question], batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if not questions or batch_size < 1:
            raise ConfigError(f"{len(questions)} questions in batches of {batch_size}: both must be at least 1")
        self._questions = questions
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    @property
    def steps_per_epoch(self) -> int:
        """Batches until every question was asked once, rounded up."""
        return -(-len(self._questions) // self._batch_size)

    def next_batch(self) -> list[Question]:
        """The next `batch_size` questions; one question may stand in it twice where it crosses epochs."""
        return [self._next() for _ in range(self._batch_size)]

    def state(self) -> dict[str, int]:
        """Where the stream stands: finished epochs, and questions asked of the current one."""
        return {"epoch": self._epoch, "position": self._position, "num_questions": len(self._questions)}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from `state`. Raises `DataError` when it was taken over another number of questions."""
        if state["num_questions"] != len(self._questions):
            raise DataError(
                f"the checkpoint was taken over {state['num_questions']} training questions, data.train_files now hold "
                f"{len(self._questions)}: resume with the same files, or start anew with trainer.resume=never"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _next(self) -> Question:
        if self._position == len(self._questions):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._permutation()
        self._position += 1
        return self._questions[self._order[self._position - 1]]

    def _permutation(self) -> list[int]:
        order = list(range(len(self._questions)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def _expand(files: Sequence[str]) -> list[Path]:
    paths: dict[Path, None] = {}
    for name in files:
        matches = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise DataError(f"{name}: there is no such file, and no file matches it")
        paths.update(dict.fromkeys(map(Path, matches)))
    if not paths:
        raise DataError("no data files were given")
    return list(paths)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.is_dir():
        raise DataError(f"{path}: this is a folder; name its files, e.g. {path}/*.parquet")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    readers: dict[str, Callable[[Path], Iterator[Mapping[str, Any]]]] = {".parquet": _parquet, ".jsonl": _json_lines}
    if path.suffix not in readers:
        raise DataError(f"{path}: questions are read from .parquet and .jsonl files")
    return readers[path.suffix](path)


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = [name for name in _COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(columns=present):
                yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: this is no readable parquet file ({error})") from error


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:  # bytes, so that only \n ends a line
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}: line {number} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}: line {number} is not a JSON object")
            yield row


def _question(row: Mapping[str, Any], path: Path, number: int, template: str, taken: set[str]) -> Question:
    where = f"{path}: row {number}"
    prompt = _messages(row.get("prompt"), where)
    extra: Mapping[str, Any] = row["extra_info"] if isinstance(row.get("extra_info"), Mapping) else {}
    text = _text(row, extra, prompt)
    if not text:
        raise DataError(f"{where} has neither a prompt nor a question")
    if template != "dataset":
        prompt = prompt_messages(template, text)
    elif not prompt:
        raise DataError(f"{where} has a question but no prompt: set data.template to render one, e.g. search_r1")
    answers = _row_answers(row)
    if not answers:
        raise DataError(f"{where} has no golden answers (reward_model.ground_truth.target or golden_answers)")
    source = str(row.get("data_source") or "unknown")
    question_id = _row_id(row, extra, source, path, number)
    if question_id in taken:
        question_id = f"{question_id}@{path.name}:{number}"
    if question_id in taken:
        question_id = f"{question_id}@{path}:{number}"
    return Question(question_id, source, text, prompt, answers, _tools(row.get("tools"), where))


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}] if value.strip() else []
    messages = []
    for message in value or ():
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES or message.get("content") is None:
            raise DataError(f"{where}: a prompt message needs a content and one role of {'/'.join(_ROLES)}: {message}")
        messages.append({"role": message["role"], "content": str(message["content"])})
    return tuple(messages)


def _tools(value: Any, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: the tools column holds the names of registered tools, not {names}")
    return tuple(dict.fromkeys(names))


def _text(row: Mapping[str, Any], extra: Mapping[str, Any], prompt: Sequence[Mapping[str, str]]) -> str:
    text = str(extra.get("question") or row.get("question") or "").strip()
    if text or not prompt:
        return text
    return prompt[-1]["content"].rpartition("Question:")[2].strip()


def _row_answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    reward_model = row.get("reward_model")
    answers = golden_answers(reward_model.get("ground_truth")) if isinstance(reward_model, Mapping) else ()
    return answers or golden_answers(row.get("golden_answers"))


def _row_id(row: Mapping[str, Any], extra: Mapping[str, Any], source: str, path: Path, number: int) -> str:
    given = row.get("id") if row.get("id") not in (None, "") else extra.get("id")
    if given not in (None, ""):
        return str(given)
    split = extra.get("split") or row.get("split") or path.stem
    index = extra.get("index")
    return f"{source}/{split}/{number - 1 if index is None else index}"
