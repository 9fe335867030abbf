"""Several parquet files of questions into one, with ids that stay unique."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.cli import console, count_table, existing_file, exit_code, parser
from data_prep.rows import RL_SCHEMA, write_parquet
from search_r1.data.questions import golden_answers
from search_r1.errors import DataError

EXAMPLES = """\
  python -m data_prep.merge data/nq_train.parquet data/hotpot_train.parquet --output data/train.parquet --shuffle"""

MERGED_SCHEMA = RL_SCHEMA.append(pa.field("tools", pa.list_(pa.string())))


def read_rl_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of one file, cut down to what training reads: the RL schema and `tools`, None where not given. What
    `extra_info` lacks of id, question and split is taken from columns of these names, golden answers from theirs.

    Raises:
        DataError: not parquet, or columns missing or of another type.
    """
    try:
        table = pq.read_table(path)
        missing = [name for name in RL_SCHEMA.names if name not in table.column_names]
        if missing:
            raise DataError(f"{path}: the columns {', '.join(missing)} are missing; write it with data_prep.qa")
        rows = [_completed(row) for row in table.to_pylist()]
        typed: list[dict[str, Any]] = pa.Table.from_pylist(rows, schema=MERGED_SCHEMA).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{path}: this is no parquet file of the RL schema ({error})") from None
    return typed


def _completed(row: dict[str, Any]) -> dict[str, Any]:
    extra = {"id": row.get("id"), "question": row.get("question"), "split": row.get("split"), "index": None}
    given = row["extra_info"] if isinstance(row["extra_info"], dict) else {}
    reward = row["reward_model"] if isinstance(row["reward_model"], dict) else {"style": "rule"}
    tools = row.get("tools")
    answers = golden_answers(reward.get("ground_truth")) or golden_answers(row.get("golden_answers"))
    return {
        **row,
        "reward_model": {**reward, "ground_truth": {"target": answers}},
        "extra_info": extra | {key: value for key, value in given.items() if value is not None},
        "tools": [tools] if isinstance(tools, str) else tools,
    }


def merge(paths: Sequence[Path], seed: int | None) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """All rows in the order of the files, or shuffled by `seed`, and counts by file.

    A row that stands in two files (same id, same prompt) is kept once; another row under a taken id gets an id of
    its own.
    """
    rows: dict[str, dict[str, Any]] = {}
    counts = {"repeated rows dropped": 0}
    for path in paths:
        found = read_rl_rows(path)
        counts[str(path)] = len(found)
        for number, row in enumerate(found):
            extra = row["extra_info"]
            row_id = str(extra["id"] or f"{row['data_source']}/{extra['split'] or path.stem}/{number}")
            if row_id in rows and rows[row_id]["prompt"] == row["prompt"]:
                counts["repeated rows dropped"] += 1
                continue
            row_id = f"{row_id}@{path}:{number}" if row_id in rows else row_id
            extra["id"] = row_id
            rows[row_id] = row
    merged = list(rows.values())
    if seed is not None:
        random.Random(seed).shuffle(merged)
    return merged, {**counts, "written": len(merged)}


def command(arguments: argparse.Namespace) -> None:
    paths = [existing_file(path) for path in arguments.inputs]
    rows, counts = merge(paths, arguments.seed if arguments.shuffle else None)
    if not rows:
        raise DataError("the files hold no rows, so nothing is written")
    has_tools = any(row["tools"] is not None for row in rows)
    write_parquet(arguments.output, rows, MERGED_SCHEMA if has_tools else RL_SCHEMA)
    console.print(count_table("merged", counts))
    console.print(f"wrote {arguments.output}")


def main(argv: list[str] | None = None) -> int:
    options = parser("merge", __doc__, EXAMPLES)
    options.add_argument("inputs", nargs="+", help="parquet files of the RL schema")
    options.add_argument("--output", required=True, help="the parquet file to write")
    options.add_argument("--shuffle", action="store_true", help="mix the sources instead of keeping the order")
    options.add_argument("--seed", type=int, default=0, help="of the shuffle (default: 0)")
    return exit_code(command, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
