"""Curves as inline SVG: the numbers a template needs, no drawing library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from search_r1.report.run_folder import Curve

WIDTH, HEIGHT, MARGIN = 300, 120, 6
HEADLINES = (
    "val/em",
    "val/*/em",
    "reward/mean",
    "rollout/searches",
    "tools/*/calls",
    "rollout/valid_action_rate",
    "length/response_mean",
    "length/sampled_mean",
)
"""Patterns of the curves that stand first, in this order."""


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    points: str
    """The `points` attribute of a polyline."""
    dots: list[tuple[float, float]]
    """Single marks, for curves with few points."""
    low: str
    high: str
    first_step: str
    last_step: str
    last: str
    dropped: int
    """Points that are not finite, left out of the line and told beside it."""


def chart(name: str, curve: Curve) -> Chart | None:
    """None when no point is finite."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if not finite:
        return None
    steps, values = [step for step, _ in finite], [value for _, value in finite]
    low, high = min(values), max(values)
    xs = [_scaled(step, steps[0], steps[-1], MARGIN, WIDTH - MARGIN) for step in steps]
    ys = [_scaled(value, low, high, HEIGHT - MARGIN, MARGIN) for value in values]
    dots = list(zip(xs, ys, strict=True)) if len(finite) <= 12 else []
    return Chart(
        name=name,
        points=" ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True)),
        dots=dots,
        low=f"{low:.4g}",
        high=f"{high:.4g}",
        first_step=f"{steps[0]:g}",
        last_step=f"{steps[-1]:g}",
        last=f"{values[-1]:.4g}",
        dropped=len(curve) - len(finite),
    )


def _scaled(value: float, low: float, high: float, start: float, end: float) -> float:
    return (start + end) / 2 if high == low else start + (value - low) / (high - low) * (end - start)


def grouped_charts(curves: Mapping[str, Curve]) -> tuple[list[Chart], dict[str, list[Chart]]]:
    """The headline charts, and all others by area."""
    headlines: list[Chart] = []
    areas: dict[str, list[Chart]] = {}
    for name, curve in curves.items():
        drawn = chart(name, curve)
        if drawn is None:
            continue
        if _rank(name) < len(HEADLINES):
            headlines.append(drawn)
        else:
            areas.setdefault(name.partition("/")[0], []).append(drawn)
    headlines.sort(key=lambda drawn: _rank(drawn.name))
    return headlines, areas


def _rank(name: str) -> int:
    return next((rank for rank, pattern in enumerate(HEADLINES) if fnmatchcase(name, pattern)), len(HEADLINES))
