"""Render a run as one HTML file that asks for nothing from outside and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from search_r1.report.charts import HEIGHT, WIDTH, grouped_charts
from search_r1.report.run_folder import Run, read_run

ASSETS = Path(__file__).parent / "assets"


def write_report(folder: Path, output: Path | None = None, max_per_file: int = 40) -> Path:
    """Write `report.html` into the run folder (or to `output`) and return its path."""
    target = output or folder / "report.html"
    page = render(read_run(folder, max_per_file))
    partial = target.with_name(f"{target.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(target)
    return target


def render(run: Run) -> str:
    """The page. What a model or a passage wrote reaches it as text: escaped here, `textContent` in the browser."""
    script = (ASSETS / "viewer.js").read_text(encoding="utf-8")
    headlines, areas = grouped_charts(run.curves)
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        run=run,
        headlines=headlines,
        areas=areas,
        table=_before_and_after(run.summary),
        facts={key: value for key, value in run.summary.items() if not isinstance(value, Mapping | list | None)},
        width=WIDTH,
        height=HEIGHT,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup((ASSETS / "style.css").read_text(encoding="utf-8")),
        data=Markup(_json_for_html(run.trajectories)),
    )


def _before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Rows of the table (measure, before, after): every measure over all questions, then exact match by data source."""
    rows = _pairs(summary)
    by_source = summary.get("by_source")
    for source, part in by_source.items() if isinstance(by_source, Mapping) else ():
        rows += [(f"{source} {name}", before, after) for name, before, after in _pairs(part) if name == "em"]
    return rows


def _pairs(part: Any) -> list[tuple[str, Any, Any]]:
    """Without a `before` where there was no validation before training."""
    before, after = (part.get("before"), part.get("after")) if isinstance(part, Mapping) else (None, None)
    if not isinstance(after, Mapping):
        return []
    before = before if isinstance(before, Mapping) else {}
    names = [name for name, value in after.items() if isinstance(value, int | float) and name != "questions"]
    return [(name, before.get(name), after[name]) for name in names]


def _json_for_html(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever text it holds."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
