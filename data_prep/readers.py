"""The forms in which question sets are published, read into `Record`s.

A container (JSON lines, one JSON array, tsv or csv, parquet) yields rows; a `Form` says where a row keeps its
question, its answers and its id. Which form a file has is read off its first row.
"""

from __future__ import annotations

import ast
import csv
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data_prep.cli import existing_file
from search_r1.errors import DataError

Row = Mapping[str, Any]
_WRAPPERS = {"Data", "data"}
_ESCAPED = re.compile(r'"(?:[^"]|"")+"')


@dataclass(frozen=True, slots=True)
class Record:
    """One published question. `native_id` is the source's own id, empty when it gives none."""

    question: str
    answers: tuple[str, ...]
    native_id: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """Where rows of one published form keep things. `keys` tell the form apart; the first one is the question's."""

    keys: tuple[str, ...]
    answers: Callable[[Row], Any]
    id_keys: tuple[str, ...] = ("id", "_id")


def _musique_answers(row: Row) -> list[Any]:
    return [] if row.get("answerable") is False else [row["answer"], *(row.get("answer_aliases") or ())]


def _trivia_answers(row: Row) -> list[Any]:
    key = "answer" if "answer" in row else "Answer"
    lowered = {name.lower(): value for name, value in row[key].items()}
    return [lowered.get("value"), *(lowered.get("aliases") or ())]


def _freebase_answers(row: Row) -> list[str]:
    """`(list (description "Jamaican English") (description Patois))`, as WebQuestions was first published."""
    found = re.findall(r'\(description (?:"((?:[^"\\]|\\.)*)"|([^()]*))\)', row["targetValue"])
    return [quoted or bare for quoted, bare in found]


FORMS: dict[str, Form] = {
    "flashrag": Form(("question", "golden_answers"), lambda row: row["golden_answers"]),
    "popqa": Form(("question", "possible_answers"), lambda row: _listed(row["possible_answers"])),
    "musique": Form(("question", "answer", "answer_aliases"), _musique_answers),
    "web_questions": Form(("qText", "answers"), lambda row: row["answers"], ("qId",)),
    "web_questions_hub": Form(("question", "answers"), lambda row: row["answers"]),
    "web_questions_original": Form(("utterance", "targetValue"), _freebase_answers),
    "triviaqa": Form(("Question", "Answer", "QuestionId"), _trivia_answers, ("QuestionId",)),
    "triviaqa_hub": Form(("question", "answer", "question_id"), _trivia_answers, ("question_id",)),
    "question_answer": Form(("question", "answer"), lambda row: row["answer"]),
    "bamboogle": Form(("Question", "Answer"), lambda row: [row["Answer"]]),
    "dpr": Form(("dpr_question", "dpr_answers"), lambda row: _listed(row["dpr_answers"])),
}
"""`question_answer` is how NQ-open, HotpotQA, 2WikiMultihopQA and StrategyQA are published."""


def read_records(path: str | Path, form: str | None = None) -> Iterator[Record]:
    """The questions of a local file, in file order; questions and answers stripped, empty answers dropped.

    Raises:
        DataError: a missing, empty or malformed file (with the row's number), or one of no known form.
    """
    path = existing_file(path)
    try:
        yield from to_records(rows_of(path), str(path), form)
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the file is cut short or not UTF-8 ({error})") from None


def to_records(rows: Iterable[Row], name: str, form: str | None = None) -> Iterator[Record]:
    """Rows of one published form as records. `name` stands in error messages."""
    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        raise DataError(f"{name}: the file holds no questions")
    form = form or detect_form(first, name)
    spec = FORMS[form]
    for number, row in enumerate(itertools.chain([first], iterator), start=1):
        try:
            native = next((str(row[key]) for key in spec.id_keys if row.get(key) not in (None, "")), "")
            record = Record(str(row[spec.keys[0]] or "").strip(), _clean(spec.answers(row)), native)
            "".join((record.question, *record.answers, native)).encode()  # halves of surrogate pairs have no encoding
        except (KeyError, TypeError, AttributeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise DataError(f"{name}: row {number} is not of the form {form} ({error!r})") from None
        yield record


def detect_form(row: Row, name: str) -> str:
    """The form whose keys `row` has. Raises `DataError` when there is none."""
    for form, spec in FORMS.items():
        if all(key in row for key in spec.keys):
            return form
    raise DataError(
        f"{name}: no known form has the columns {', '.join(map(str, row))}; rename them to question and "
        f"golden_answers, or force one of {', '.join(FORMS)} with --form"
    )


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a .parquet, .jsonl, .json, .tsv, .csv or .txt file; all but parquet may be gzipped."""
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix == ".parquet":
        return _parquet(path)
    if suffix in (".tsv", ".csv", ".txt"):
        return _table(path)
    if suffix in (".json", ".jsonl"):
        return _json(path)
    raise DataError(f"{path}: question files end in .jsonl, .json, .tsv, .csv, .txt or .parquet, or in these with .gz")


def _open(path: Path) -> IO[str]:
    # Lines end at \n alone: answers contain U+2028 and other characters that str.splitlines takes for line ends.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return path.open(encoding="utf-8-sig", newline="\n")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: this is no readable parquet file ({error})") from None


def _json(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        first = file.readline()
        file.seek(0)
        rows = _json_lines(file, path) if ".jsonl" in path.suffixes or _is_row(first) else _json_array(file, path)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise DataError(f"{path}: row {number} is not a JSON object")
            yield row


def _is_row(line: str) -> bool:
    """Whether a .json file's first line is a row of its own (JSON lines), not the start of one object or array."""
    if not line.lstrip().startswith("{"):
        return False
    try:
        return _WRAPPERS.isdisjoint(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _json_lines(file: IO[str], path: Path) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number} is not JSON ({error})") from None


def _json_array(file: IO[str], path: Path) -> list[Any]:
    try:
        content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: this is not JSON ({error})") from None
    if isinstance(content, dict):
        content = next((content[key] for key in _WRAPPERS if key in content), None)
    if not isinstance(content, list):
        raise DataError(f"{path}: expected a list of questions, or an object with a list under Data")
    return content


def _table(path: Path) -> Iterator[Row]:
    """tsv or csv with a header that names a question column, else DPR's two columns without a header."""
    csv.field_size_limit(1 << 30)  # a long list of answers is one field
    with _open(path) as file:
        delimiter = "\t" if "\t" in file.readline() else ","
        file.seek(0)
        header: list[str] | None = None
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            fields = next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter))
            if number == 1 and any(name.lower() == "question" for name in fields):
                header = fields
                continue
            if header is None:
                fields[0] = _unquoted(fields[0])
            names = header or ["dpr_question", "dpr_answers"]
            if len(fields) != len(names):
                raise DataError(f"{path}: line {number} has {len(fields)} columns instead of {len(names)}")
            yield dict(zip(names, fields, strict=True))


def _unquoted(field: str) -> str:
    """DPR's files escape some fields twice; a field that only begins and ends with quoted words is none of them."""
    while _ESCAPED.fullmatch(field):
        field = field[1:-1].replace('""', '"')
    return field


def _listed(text: Any) -> list[Any]:
    """A list written into a text field, as JSON or as Python writes it."""
    if isinstance(text, list):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = ast.literal_eval(text)
    if not isinstance(value, list):
        raise ValueError(f"not a list: {text[:80]}")
    return value


def _clean(answers: Any) -> tuple[str, ...]:
    if isinstance(answers, str) or not isinstance(answers, Iterable):
        answers = [answers]
    spoken = ({True: "yes", False: "no"}[answer] if isinstance(answer, bool) else answer for answer in answers)
    stripped = (str(answer).strip() for answer in spoken if answer is not None)
    return tuple(dict.fromkeys(answer for answer in stripped if answer))
