"""Training and validation loss as one picture that needs no viewer but a browser: loss.svg in the run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from search_r1.report.page import ASSETS
from search_r1.report.run_folder import Curve, read_run

WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 720, 400, 64, 44, 16
SERIES = {"sft/loss": ("training", "#4c78a8"), "validation/loss": ("validation", "#e45756")}
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    color: str
    points: list[tuple[float, float]]
    last: str


@dataclass(frozen=True, slots=True)
class Tick:
    place: float
    text: str


def write_loss_plot(folder: Path) -> Path:
    """Draw the losses of the folder's metrics.jsonl; returns the picture's path. `DataError` where there are none."""
    target = folder / "loss.svg"
    partial = target.with_name(f".{target.name}.tmp")
    partial.write_text(loss_plot(read_run(folder, 0).curves), encoding="utf-8")
    partial.replace(target)
    return target


def loss_plot(curves: Mapping[str, Curve]) -> str:
    """SVG of the finite points of `SERIES`."""
    kept = {name: [(step, value) for step, value in curves.get(name, []) if math.isfinite(value)] for name in SERIES}
    points = [point for curve in kept.values() for point in curve] or [(0.0, 0.0)]
    last_step, high = max(step for step, _ in points), max(value for _, value in points)
    low = min(0.0, min(value for _, value in points))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - EDGE) * step / (last_step or 1.0)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - EDGE) * (value - low) / ((high - low) or 1.0)

    lines = [
        Line(label, color, [(x(step), y(value)) for step, value in kept[name]], f"{kept[name][-1][1]:.4g}")
        for name, (label, color) in SERIES.items()
        if kept[name]
    ]
    shares = [i / (_TICKS - 1) for i in range(_TICKS)]
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("loss.svg.j2").render(
        lines=lines,
        steps=[Tick(x(last_step * share), f"{last_step * share:.4g}") for share in shares],
        losses=[Tick(y(low + (high - low) * share), f"{low + (high - low) * share:.3g}") for share in shares],
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        floor=HEIGHT - BOTTOM,
        right=WIDTH - EDGE,
    )
