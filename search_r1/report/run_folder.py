"""Read a run folder, streaming: large runs are thinned, files cut short by a killed run are read as far as they go."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from search_r1.errors import DataError
from search_r1.rewards.exact_match import em

MAX_FILES = 60
"""Files of each kind shown; a longer run shows this many, evenly spaced, the first and the last among them."""
MAX_POINTS = 400
"""Points a curve."""
MAX_CHARS = 4000
"""Characters kept of one completion, observation or passage."""

Curve = list[tuple[float, float]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """What the page shows."""

    name: str
    curves: Mapping[str, Curve]
    """`area/name` to (step, value) points in order."""
    trajectories: list[dict[str, Any]]
    num_trajectories: int
    """Rows seen in the files that are shown, before the cap per file."""
    num_files: int
    num_unreadable: int
    """Lines that are no JSON object: the last one of a run that was killed."""
    config: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)


def read_run(folder: Path, max_per_file: int) -> Run:
    """Raises `DataError` when the folder is none of a run or of an evaluation, which has no curves."""
    metrics_file, questions = folder / "metrics.jsonl", folder / "questions.jsonl"
    if not metrics_file.is_file() and not questions.is_file():
        raise DataError(f"{folder} is no run folder: it has no metrics.jsonl; name one, e.g. runs/quickstart/latest")
    unreadable: list[str] = []
    curves = _curves(metrics_file, unreadable) if metrics_file.is_file() else {}
    trajectories = [questions] if questions.is_file() else (folder / "trajectories").glob("*.jsonl")
    files = sorted(trajectories, key=_file_order)
    thinned = [path for _, kind in groupby(files, key=_kind) for path in _evenly(list(kind), MAX_FILES)]
    shown, seen = [], 0
    for path in thinned:
        for index, row in enumerate(_rows(path, unreadable)):
            seen += 1
            if index < max_per_file:
                shown.append(_trimmed(row, path.stem))
    config = folder / "config.yaml"
    return Run(
        name=f"{folder.resolve().parent.name}/{folder.resolve().name}",
        curves=curves,
        trajectories=shown,
        num_trajectories=seen,
        num_files=len(files),
        num_unreadable=len(unreadable),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        versions=_json_file(folder / "versions.json"),
        summary=_json_file(folder / "summary.json"),
    )


def _kind(path: Path) -> str:
    """`step_` or `val_`: a training step's or a validation's trajectories."""
    return path.stem.rstrip("0123456789")


def _file_order(path: Path) -> tuple[str, int]:
    return _kind(path), int(path.stem[len(_kind(path)) :] or 0)


def _evenly(items: list[T], count: int) -> list[T]:
    if len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _rows(path: Path, unreadable: list[str]) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
            elif line.strip():
                unreadable.append(path.name)


def _curves(path: Path, unreadable: list[str]) -> dict[str, Curve]:
    """A step that was repeated after a resume counts once, as it was last."""
    by_name: dict[str, dict[float, float]] = {}
    for row in _rows(path, unreadable):
        step = row.get("step")
        if not isinstance(step, int | float):
            continue
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                by_name.setdefault(name, {})[float(step)] = float(value)
    return {name: _evenly(sorted(points.items()), MAX_POINTS) for name, points in sorted(by_name.items())}


def _json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _trimmed(row: dict[str, Any], file: str) -> dict[str, Any]:
    """Without token ids (the spans stay), with long texts cut and the verdict worked out."""
    ids = row.pop("token_ids", [])
    row["file"], row["num_tokens"] = file, len(ids)
    row["right"] = _is_right(row)
    return {key: _cut(value) for key, value in row.items()}


def _is_right(row: Mapping[str, Any]) -> bool | None:
    """By exact match, whatever was rewarded: the reward's part `em`, else the answer's; None for a VOID trajectory."""
    if row.get("reward") is None:
        return None
    parts, answer = row.get("reward_parts") or {}, row.get("answer")
    return bool(parts["em"] >= 1.0 if "em" in parts else answer and em(answer, row.get("golden_answers") or ()))


def _cut(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and len(value) > MAX_CHARS:
        return f"{value[:MAX_CHARS]} … ({len(value) - MAX_CHARS} more characters)"
    if isinstance(value, list):
        return [_cut(item) for item in value]
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    return value
