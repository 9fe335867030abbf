"""Published question sets to parquet in the schema that training and evaluation read."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from data_prep import hub
from data_prep.cli import console, count_table, exit_code, parser, positive
from data_prep.readers import FORMS, Record, read_records, to_records
from data_prep.rows import RL_SCHEMA, ExtraInfo, rl_row, write_parquet
from search_r1.errors import ConfigError, DataError
from search_r1.prompts import TEMPLATES, check_template

EXAMPLES = """\
  python -m data_prep.qa --source nq --split train --output data/nq_train.parquet
  python -m data_prep.qa --source hotpotqa --split dev --input hotpot_dev_distractor_v1.json --output hotpot.parquet
  python -m data_prep.qa --source triviaqa --split test --input trivia-test.qa.csv --dry-run"""
DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".tsv", ".csv", ".txt", ".gz")


@dataclass(slots=True)
class Converted:
    """Rows of the RL schema, and how many records were read and dropped, by reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: {"read": 0, "no question": 0, "no answer": 0, "duplicate question": 0, "kept": 0}
    )


def convert(
    records: Iterable[Record], *, source: str, split: str, template: str = "search_r1", limit: int | None = None
) -> Converted:
    """Records to rows: those without question or answer and repeated questions are dropped and counted.

    A row's id is `{source}/{split}/{the source's own id, else the record's position}`; its index is the position.
    Two questions are the same when they have the same answers and differ in case, white space or the question mark
    only: a text may be asked of several things of one name, with an answer each.
    """
    result, questions, ids = Converted(), set(), set()
    for index, record in enumerate(records):
        if limit is not None and result.counts["kept"] >= limit:
            break
        result.counts["read"] += 1
        text = " ".join(record.question.casefold().split()).rstrip("? ")
        key = (text, *sorted(record.answers))
        if not text:
            result.counts["no question"] += 1
        elif not record.answers:
            result.counts["no answer"] += 1
        elif key in questions:
            result.counts["duplicate question"] += 1
        else:
            questions.add(key)
            row_id = f"{source}/{split}/{record.native_id or index}"
            row_id = f"{row_id}#{index}" if row_id in ids else row_id
            ids.add(row_id)
            result.counts["kept"] += 1
            extra = ExtraInfo(split, index, row_id)
            result.rows.append(rl_row(record.question, record.answers, source, template, extra))
    return result


def open_records(source: str, split: str, place: str | None, form: str | None) -> Iterator[Record]:
    """The records of `place`: a file, a folder or a hub name; None is the FlashRAG collection on the hub."""
    if place is None:
        hub.check_source(source)
        place = hub.COLLECTION
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", place) and not place.endswith(DATA_SUFFIXES)
    if Path(place).is_dir() or (is_hub_name and not Path(place).exists()):
        return to_records(hub.hub_rows(place, source, split), place, form)
    return read_records(place, form)


def command(arguments: argparse.Namespace) -> None:
    check_template(arguments.template)
    if arguments.form and arguments.form not in FORMS:
        raise ConfigError(f"--form {arguments.form} is not known: choose from {', '.join(FORMS)}")
    if not arguments.output and not arguments.dry_run:
        raise ConfigError("name a file with --output, or look first with --dry-run")
    if arguments.source not in hub.SOURCES:
        console.print(f"note: {arguments.source} is none of {', '.join(hub.SOURCES)}; taken as a source of its own")
    records = open_records(arguments.source, arguments.split, arguments.input, arguments.form)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        result = convert(
            progress.track(records, total=None, description="reading questions"),
            source=arguments.source,
            split=arguments.split,
            template=arguments.template,
            limit=arguments.limit,
        )
    console.print(count_table(f"{arguments.source} {arguments.split}", result.counts))
    if not result.rows:
        raise DataError(f"{arguments.input or hub.COLLECTION}: no question was kept, so nothing is written")
    if arguments.dry_run:
        for row in result.rows[:2]:
            console.print_json(data=row)
        console.print("dry run: nothing was written")
        return
    write_parquet(arguments.output, result.rows, RL_SCHEMA)
    console.print(f"wrote {arguments.output}")


def main(argv: list[str] | None = None) -> int:
    options = parser("qa", __doc__, EXAMPLES)
    options.add_argument("--source", required=True, help=f"one of {', '.join(hub.SOURCES)}, or a name of your own")
    options.add_argument("--split", default="train", help="train, dev or test; recorded in every row (default: train)")
    options.add_argument(
        "--input",
        help=f"a published file, a folder or a hub dataset (default: {hub.COLLECTION}, part SOURCE)",
    )
    options.add_argument("--form", help=f"form of the input where it is not recognised: {', '.join(FORMS)}")
    options.add_argument("--output", help="the parquet file to write")
    options.add_argument("--template", default="search_r1", help=f"prompt: {', '.join(TEMPLATES)} (default: search_r1)")
    options.add_argument("--limit", type=positive, help="keep so many questions")
    options.add_argument("--dry-run", action="store_true", help="count and show two rows, write nothing")
    return exit_code(command, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
