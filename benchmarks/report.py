"""One table and one JSON file a benchmark, the ratio last."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def finish(
    name: str, title: str, rows: Sequence[Mapping[str, object]], ratio: float, what: str, **facts: object
) -> None:
    """Print `rows` as a table, what `ratio` compares, and last the ratio; write all of it to results/<name>.json.

    Args:
        facts: settings of the run, for the file.
    """
    columns = list(rows[0])
    cells = [columns, *[[_cell(row[column]) for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    print(title)
    for line in cells:
        print(
            "  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        )
    machine = {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "machine": platform.machine()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    RESULTS.mkdir(exist_ok=True)
    result = {"ratio": round(ratio, 3), "what": what, "rows": list(rows), **facts, "machine": machine}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{what}: {ratio:.2f}")


def _cell(value: object) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and value < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )
