"""Real data that lies beside the checkout, read in place (`$SEARCH_R1_SHARED`, else ../shared)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("SEARCH_R1_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def shared_data(name: str) -> Path:
    """A file or folder below `data/`; the test is skipped where it is missing."""
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"shared data is missing: {path}")
    return path


def json_lines(name: str) -> list[dict[str, Any]]:
    with shared_data(name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
