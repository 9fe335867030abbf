"""What a person sees while a run goes on: a bar with the rising reward, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from search_r1.protocols import Metrics


class RunConsole:
    """One bar for training, one for what goes on inside a phase. Silent where `enabled` is False."""

    def __init__(self, total_steps: int, enabled: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not enabled)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not enabled,
        )
        self._training = self._progress.add_task("training", total=total_steps, note="", visible=False)
        self._phase: TaskID | None = None

    def __enter__(self) -> RunConsole:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress inside a phase; it disappears when done."""
        if self._phase is None:
            self._phase = self._progress.add_task(name, total=total, note="")
        self._progress.update(self._phase, description=name, completed=done, total=total)
        if done >= total:
            self._progress.remove_task(self._phase)
            self._phase = None

    def step(self, step: int, metrics: Metrics) -> None:
        note = (
            f"reward {metrics['reward/mean']:.3f}  searches {metrics['rollout/searches']:.2f}  "
            f"valid {metrics['rollout/valid_action_rate']:.2f}"
            + "".join(f"  {tool} {number:.0f}" for tool, number in _tool_calls(metrics).items() if tool != "search")
        )
        if metrics["rollout/num_void"]:
            note += f"  [red]void {metrics['rollout/num_void']:.0f}[/red]"
        self._progress.update(self._training, completed=step, note=note, visible=True)
        if not self.console.is_terminal:
            self.say(f"step {step}: {note}")


def comparison_table(before: Mapping[str, Metrics] | None, after: Mapping[str, Metrics]) -> Table:
    """Exact match, searches per question and valid actions, before and after, a row a data source; tool calls below."""
    table = Table(title="Validation" if before is None else "Validation, before → after")
    table.add_column("data source", no_wrap=True, min_width=max(len("data source"), *map(len, after)))
    names = {
        "exact match": "em",
        "F1": "f1",
        "searches / question": "searches_per_question",
        "valid actions": "valid_action_rate",
    }
    for title in ("questions", *names):
        table.add_column(title, justify="right")
    for source, summary in after.items():
        cells = [f"{summary['questions']:.0f}"]
        for name in names.values():
            old = f"{before[source][name]:.3f} → " if before and source in before else ""
            cells.append(f"{old}{summary[name]:.3f}")
        table.add_row(source, *cells)
    earlier, calls = (_tool_calls((summaries or {}).get("all", {})) for summaries in (before, after))
    told = [
        f"{tool} {f'{earlier.get(tool, 0.0):.0f} → ' if before else ''}{calls.get(tool, 0.0):.0f}"
        for tool in sorted(earlier | calls)
    ]
    table.caption = f"tool calls: {', '.join(told)}" if told else None
    return table


def _tool_calls(metrics: Metrics) -> dict[str, float]:
    """`tools/<name>/calls` by the tool's name."""
    return {name.split("/")[1]: value for name, value in metrics.items() if fnmatchcase(name, "tools/*/calls")}
