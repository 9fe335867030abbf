"""Passage vectors as they lie on disk, shards or what others published, read in slices and never joined."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever_server.errors import StartError

_FLAT_INNER_PRODUCT = b"IxFI"
_FLAT_HEADER = struct.Struct("<4siqqq?iQ")
"""FAISS's IndexFlatIP: kind, dimension, rows, two unused, trained, metric, number of floats; then the floats."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one file that hold vectors. A vector may begin in one piece and end in the next."""

    path: Path
    start: int
    num_bytes: int


class Vectors:
    """(rows, dim) vectors over the bytes of several files, taken one after the other.

    Raises:
        StartError: a file is missing or shorter than it should be, or the bytes are no whole number of vectors.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: str, dim: int) -> None:
        self.pieces = list(pieces)
        self.dtype = np.dtype(dtype)
        self.dim = dim
        self._row_bytes = self.dtype.itemsize * dim
        self._maps = [_map(piece) for piece in self.pieces]
        self._ends = np.cumsum([piece.num_bytes for piece in self.pieces])
        num_bytes = int(self._ends[-1]) if self.pieces else 0
        if num_bytes % self._row_bytes:
            raise StartError(f"{num_bytes:,} bytes are no whole number of {dim}-dimensional {self.dtype} vectors")
        self._rows = num_bytes // self._row_bytes

    def __len__(self) -> int:
        return self._rows

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """(stop - start, dim) vectors: a view of the file where they lie in one piece, else a copy."""
        first, last = start * self._row_bytes, stop * self._row_bytes
        found = []
        number = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            begin = int(self._ends[number]) - self.pieces[number].num_bytes
            end = min(last, int(self._ends[number]))
            found.append(self._maps[number][first - begin : end - begin])
            first, number = end, number + 1
        data = found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, np.uint8)
        if data.ctypes.data % self.dtype.itemsize:
            data = data.copy()
        return data.view(self.dtype).reshape(stop - start, self.dim)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n, dim) vectors of single rows."""
        found = np.empty((len(rows), self.dim), dtype=np.float32)
        for place, row in enumerate(rows.tolist()):
            found[place] = self.read(row, row + 1)[0]
        return found

    def max_norm(self) -> float:
        """Length of the longest vector. Reads everything once.

        Raises:
            StartError: a vector holds NaN or infinity.
        """
        longest = 0.0
        for start in range(0, len(self), 65_536):
            block = self.read(start, min(start + 65_536, len(self))).astype(np.float32)
            norms = np.linalg.norm(block.astype(np.float64), axis=1)
            if not np.isfinite(norms).all():
                row = start + int(np.flatnonzero(~np.isfinite(norms))[0])
                raise StartError(f"the vector of row {row:,} holds a value that is not a finite number")
            longest = max(longest, float(norms.max(initial=0.0)))
        return longest

    def describe(self, folder: Path) -> dict[str, Any]:
        """What a manifest keeps of them; files inside `folder` are named relative to it."""
        pieces = [
            [str(piece.path.relative_to(folder) if piece.path.is_relative_to(folder) else piece.path.resolve()),
             piece.start, piece.num_bytes]
            for piece in self.pieces
        ]  # fmt: skip
        return {"dtype": self.dtype.name, "dim": self.dim, "pieces": pieces}

    @classmethod
    def described(cls, folder: Path, facts: dict[str, Any]) -> Vectors:
        pieces = [Piece(folder / path, start, num_bytes) for path, start, num_bytes in facts["pieces"]]
        return cls(pieces, facts["dtype"], facts["dim"])

    @classmethod
    def of_arrays(cls, paths: Sequence[Path]) -> Vectors:
        """Over .npy files of one dtype and width."""
        pieces, kinds = [], set()
        for path in paths:
            try:
                array = np.load(path, mmap_mode="r")
                kinds.add((array.dtype.name, array.shape[1]))
            except (OSError, ValueError, EOFError, IndexError) as error:
                raise StartError(f"the vectors {path} are damaged or no (rows, dim) array: {error}") from None
            pieces.append(Piece(path, array.offset, array.nbytes))
        if len(kinds) != 1:
            raise StartError(f"the vector files differ in type or width: {sorted(kinds)}")
        ((dtype, dim),) = kinds
        return cls(pieces, dtype, dim)

    @classmethod
    def of_memmaps(cls, paths: Sequence[Path], dim: int, rows: int) -> Vectors:
        """Over raw files without a header (`emb_*.memmap`); their size tells float32 from float16."""
        sizes = [path.stat().st_size for path in paths]
        for dtype in ("float32", "float16"):
            if sum(sizes) == rows * dim * np.dtype(dtype).itemsize:
                pieces = [Piece(path, 0, size) for path, size in zip(paths, sizes, strict=True)]
                return cls(pieces, dtype, dim)
        raise StartError(
            f"{len(paths)} files hold {sum(sizes):,} bytes; {rows:,} vectors of {dim} numbers have "
            f"{rows * dim * 4:,} in float32 or {rows * dim * 2:,} in float16"
        )

    @classmethod
    def of_flat_index(cls, paths: Sequence[Path]) -> Vectors | None:
        """Over a FAISS Flat inner-product index, whole or in the parts it was published in; None for other kinds."""
        with paths[0].open("rb") as file:
            head = file.read(_FLAT_HEADER.size)
        if len(head) < _FLAT_HEADER.size or head[:4] != _FLAT_INNER_PRODUCT:
            return None
        _, dim, rows, _, _, _, _, count = _FLAT_HEADER.unpack(head)
        sizes = [path.stat().st_size for path in paths]
        expected = _FLAT_HEADER.size + 4 * rows * dim
        if count != rows * dim or sum(sizes) != expected:
            names = ", ".join(path.name for path in paths)
            raise StartError(f"{names}: {sum(sizes):,} bytes, but the header tells of {expected:,}: a part is missing")
        starts = [_FLAT_HEADER.size] + [0] * (len(paths) - 1)
        pieces = [Piece(path, start, size - start) for path, start, size in zip(paths, starts, sizes, strict=True)]
        return cls(pieces, "float32", dim)


def _map(piece: Piece) -> NDArray[np.uint8]:
    try:
        return np.memmap(piece.path, np.uint8, "r", piece.start, (piece.num_bytes,))
    except FileNotFoundError:
        raise StartError(f"the vectors {piece.path} do not exist") from None
    except ValueError:
        raise StartError(f"the vectors {piece.path} are damaged: shorter than {piece.num_bytes:,} bytes") from None
