"""What the command lines of this package share: the console, errors as sentences, files that appear whole."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from search_r1.errors import ConfigError, DataError

console = Console(stderr=True, highlight=False, soft_wrap=True)


def parser(module: str, description: str, examples: str) -> argparse.ArgumentParser:
    """An argument parser whose help ends with commands to copy."""
    return argparse.ArgumentParser(
        prog=f"python -m data_prep.{module}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def exit_code(command: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """Run a command. A person's mistake or a failing file becomes one sentence on stderr and exit code 2."""
    try:
        command(arguments)
    except (ConfigError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written", style="bold red")
        return 130
    return 0


def existing_file(path: str | Path) -> Path:
    """The path, if a file with something in it stands there. Raises `DataError` otherwise."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    return path


def positive(text: str) -> int:
    """An argument type: a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block succeeds and vanishes when it fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def count_table(title: str, counts: dict[str, int]) -> Table:
    """`what happened: how many`, one row each, in the order given."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    return table
