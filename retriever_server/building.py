"""What every index builder needs: a folder that appears under its name only when it is whole, and progress in words."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from retriever_server.corpus import Corpus
from retriever_server.errors import StartError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
OFFSETS = "offsets.npy"
"""Where each line of the corpus starts, so that a start need not read it again."""
_SETTINGS = "settings.json"
_REPORT_EVERY_S = 10.0


def begin(folder: Path, settings: dict[str, Any]) -> Path:
    """The folder to build in, `<folder>.partial`, with what an earlier, interrupted build of the same settings left.

    Raises:
        StartError: `folder` exists, or the interrupted build had other settings.
    """
    if folder.exists():
        raise StartError(f"{folder} exists already")
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    written = orjson.dumps(settings, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    path = partial / _SETTINGS
    if path.exists():
        if path.read_bytes() != written:
            raise StartError(f"{partial} was begun with other settings or another corpus: delete it to start again")
        logger.info("going on with the interrupted build in %s", partial)
    elif any(partial.iterdir()):
        raise StartError(f"{partial} is no interrupted build: move it away or delete it")
    else:
        write_whole(path, written)
    return partial


def finish(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    write_whole(partial / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
    (partial / _SETTINGS).unlink()
    partial.rename(folder)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either there with all its bytes or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(data)
    unfinished.rename(path)


def new_array_file(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A .npy file to be filled in place."""
    array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", dtype, shape)  # type: ignore[no-untyped-call]
    return array


def manifest_of(folder: Path) -> dict[str, Any]:
    """What a saved index says of itself."""
    try:
        manifest = orjson.loads((folder / MANIFEST).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        manifest = None
    if not isinstance(manifest, dict):
        raise StartError(f"{folder} is no index folder: it has no readable {MANIFEST}")
    return manifest


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest of a saved index, which must be of that kind."""
    manifest = manifest_of(folder)
    if manifest.get("retriever") != kind:
        raise StartError(f"{folder} is no {kind} index: its {MANIFEST} says otherwise")
    return manifest


def corpus_of_index(folder: Path, manifest: dict[str, Any], path: Path) -> Corpus:
    """The corpus that an index was built from, opened by the offsets that the index keeps.

    Raises:
        StartError: `path` is another corpus, or the offsets are damaged.
    """
    try:
        offsets = np.load(folder / OFFSETS, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise StartError(f"the index {folder} is damaged: {OFFSETS}: {error}; build it again") from None
    corpus = Corpus.reopen(path, offsets, complete=manifest.get("complete") is True)
    if corpus.fingerprint != manifest.get("corpus"):
        raise StartError(f"the index {folder} was built for another corpus than {path}")
    return corpus


class Progress:
    """Logs how far a long job is, every ten seconds and at its end."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._skipped = 0
        self._started = self._reported = time.monotonic()

    def skip(self, count: int) -> None:
        """Done by an earlier run: counts as progress, not as speed."""
        self._done += count
        self._skipped += count

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._reported < _REPORT_EVERY_S and self._done < self._total:
            return
        self._reported = now
        rate = (self._done - self._skipped) / max(now - self._started, 1e-6)
        logger.info(
            "%s: %s of %s (%.1f %%), %.0f a second, %s left",
            self._what,
            f"{self._done:,}",
            f"{self._total:,}",
            100 * self._done / max(self._total, 1),
            rate,
            duration((self._total - self._done) / max(rate, 1e-6)),
        )


def duration(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
