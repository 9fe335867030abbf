"""Rows of the RL schema, and the parquet files they are written to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.cli import whole_file
from search_r1.prompts import normalize_question, prompt_messages

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
RL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        (
            "reward_model",
            pa.struct([("style", pa.string()), ("ground_truth", pa.struct([("target", pa.list_(pa.string()))]))]),
        ),
        (
            "extra_info",
            pa.struct([("split", pa.string()), ("index", pa.int64()), ("question", pa.string()), ("id", pa.string())]),
        ),
    ]
)
SFT_SCHEMA = pa.schema(
    [("data_source", pa.string()), ("question", pa.string()), ("messages", _MESSAGES), ("tools", pa.string())]
)


@dataclass(frozen=True, slots=True)
class ExtraInfo:
    """Where a row comes from."""

    split: str
    index: int
    """Position in the source's split; it restarts in every source."""
    row_id: str
    """Unique over all sources."""


def rl_row(question: str, answers: Iterable[str], source: str, template: str, extra: ExtraInfo) -> dict[str, Any]:
    """One question in the RL schema."""
    return {
        "data_source": source,
        "prompt": list(prompt_messages(template, question)),
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(answers)}},
        "extra_info": {
            "split": extra.split,
            "index": extra.index,
            "question": normalize_question(question),
            "id": extra.row_id,
        },
    }


def write_parquet(path: str | Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Write all rows, or leave what stood at `path` as it was."""
    with whole_file(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
