"""`python -m search_r1.report RUN_DIR`: write the run's report.html."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from search_r1.errors import SearchR1Error
from search_r1.report.page import write_report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m search_r1.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run or evaluation, e.g. runs/quickstart/latest")
    parser.add_argument("--output", type=Path, help="where to write; default RUN_DIR/report.html")
    parser.add_argument("--per-step", type=int, default=40, metavar="N", help="trajectories shown a step (default 40)")
    options = parser.parse_args(arguments)
    try:
        path = write_report(options.run_dir, options.output, options.per_step)
    except (SearchR1Error, OSError) as error:
        sys.stderr.write(f"report: {error}\n")
        return 1
    sys.stdout.write(f"Report: {path.resolve()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
