"""A corpus of JSON lines, kept as raw bytes in a memory-mapped file with an offset index."""

from __future__ import annotations

import gzip
import hashlib
import mmap
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from retriever_server.errors import StartError

_WHOLE_BYTES = 64 << 20
_SAMPLES = 1024
_SAMPLE_BYTES = 64 << 10
_BOM = b"\xef\xbb\xbf"


class Corpus:
    """Passages by row. Rows follow the file's order; ids are opaque and never used as rows."""

    def __init__(self, path: Path, data: mmap.mmap, offsets: NDArray[np.uint64], *, complete: bool) -> None:
        self.path = path
        self.offsets = offsets
        """(rows + 1,): where each line starts, then the end of the file."""
        self.complete = complete
        """Every line has `contents`, so its bytes are served as they stand."""
        self.fingerprint = fingerprint(data)
        self._data = data

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Read and check every line. Plain or gzip (decompressed once, into an unnamed temporary file).

        Raises:
            StartError: the file is missing or empty, a line is no passage, two lines share an id.
        """
        path = Path(path)
        data = _map(path)
        offsets, complete = _scan(path, data)
        return cls(path, data, offsets, complete=complete)

    @classmethod
    def reopen(cls, path: str | Path, offsets: NDArray[np.uint64], *, complete: bool) -> Corpus:
        """Open a corpus whose lines were checked when its index was built; the caller compares fingerprints."""
        path = Path(path)
        return cls(path, _map(path), offsets, complete=complete)

    def document(self, row: int) -> bytes:
        """The passage's JSON object, with `contents` added where the line has only title and text."""
        raw = self._line(row)
        if self.complete:
            return raw
        document = orjson.loads(raw)
        return raw if has_contents(document) else with_contents(document)

    def id_of(self, row: int) -> str:
        return str(orjson.loads(self._line(row))["id"])

    def texts(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The searchable text of the passages from row `start` to before `stop` (all of them), in row order."""
        for row in range(start, len(self) if stop is None else stop):
            yield contents_of(orjson.loads(self._line(row)))

    def _line(self, row: int) -> bytes:
        return self._data[self.offsets[row] : self.offsets[row + 1]].strip()


class RowById:
    """Rows by passage id. Ids that are row numbers, as wiki-18's are, need no table; the first other id makes one of 16
    bytes a passage."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._table: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None

    def __getitem__(self, passage_id: str) -> int:
        """Raises KeyError where no passage has that id."""
        corpus = self._corpus
        if len(passage_id) < 12 and passage_id.isdecimal():
            row = int(passage_id)
            if row < len(corpus) and corpus.id_of(row) == passage_id:
                return row
        if self._table is None:
            self._table = self._make_table()
        hashes, rows = self._table
        wanted = _id_hash(passage_id)
        for place in range(int(np.searchsorted(hashes, wanted)), len(hashes)):
            if hashes[place] != wanted:
                break
            if corpus.id_of(int(rows[place])) == passage_id:
                return int(rows[place])
        raise KeyError(f"no passage of {corpus.path} has the id {passage_id!r}")

    def _make_table(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        rows = range(len(self._corpus))
        hashes = np.fromiter((_id_hash(self._corpus.id_of(row)) for row in rows), np.uint64, len(self._corpus))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order


def _id_hash(passage_id: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(passage_id.encode(), digest_size=8).digest()))


def has_contents(document: dict[str, Any]) -> bool:
    contents = document.get("contents")
    return isinstance(contents, str) and bool(contents.strip())


def contents_of(document: dict[str, Any]) -> str:
    """`contents`, or title and text put together in its form: the quoted title, a newline, the text."""
    if has_contents(document):
        return str(document["contents"])
    return f'"{document.get("title") or ""}"\n{document.get("text") or ""}'


def with_contents(document: dict[str, Any]) -> bytes:
    """A passage's JSON, with `contents` added where it has only title and text."""
    return orjson.dumps(document if has_contents(document) else {**document, "contents": contents_of(document)})


def fingerprint(data: mmap.mmap) -> str:
    """SHA-256 of the size and the bytes: all of them up to 64 MiB, 1,024 evenly spaced blocks of larger files."""
    digest = hashlib.sha256(str(len(data)).encode())
    if len(data) <= _WHOLE_BYTES:
        digest.update(data)
    else:
        for start in np.linspace(0, len(data) - _SAMPLE_BYTES, _SAMPLES, dtype=np.int64).tolist():
            digest.update(data[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()[:32]


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                return _map_gzip(path)
            if file.seek(0, 2) == 0:
                raise StartError(f"the corpus {path} is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise StartError(f"the corpus {path} does not exist") from None
    except OSError as error:
        raise StartError(f"the corpus {path} cannot be read: {error.strerror or error}") from None


def _map_gzip(path: Path) -> mmap.mmap:
    with tempfile.TemporaryFile(prefix="corpus-") as plain:
        try:
            with gzip.open(path, "rb") as packed:
                _copy(packed, plain)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise StartError(f"the corpus {path} is a damaged gzip file: {error}") from None
        if plain.tell() == 0:
            raise StartError(f"the corpus {path} is empty")
        plain.flush()
        return mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ)


def _copy(source: gzip.GzipFile, target: IO[bytes]) -> None:
    while block := source.read(1 << 20):
        target.write(block)


def _scan(path: Path, data: mmap.mmap) -> tuple[NDArray[np.uint64], bool]:
    offsets = array("Q")
    id_hashes = array("q")
    complete = True
    position = len(_BOM) if data[: len(_BOM)] == _BOM else 0
    data.seek(position)
    for number, line in enumerate(iter(data.readline, b""), start=1):
        if not line.isspace():
            document = _check(path, number, line)
            complete = complete and has_contents(document)
            offsets.append(position)
            id_hashes.append(hash(str(document["id"])))
        position += len(line)
    if not offsets:
        raise StartError(f"the corpus {path} holds no passage")
    offsets.append(position)
    found = np.frombuffer(offsets, dtype=np.uint64)
    _refuse_duplicates(path, data, found, np.frombuffer(id_hashes, dtype=np.int64))
    return found, complete


def _check(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path} line {number}"
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise StartError(f"{where} is not JSON: {error.msg}") from None
    if not isinstance(document, dict):
        raise StartError(f"{where} is a JSON {type(document).__name__}, not an object with id and contents")
    passage_id = document.get("id")
    if isinstance(passage_id, bool) or not isinstance(passage_id, str | int) or passage_id == "":
        raise StartError(f"{where} has no id")
    text = (document.get(key) for key in ("contents", "title", "text"))
    if not any(isinstance(value, str) and value.strip() for value in text):
        raise StartError(f"{where} (id {passage_id!r}) has neither contents nor title and text")
    return document


def _refuse_duplicates(path: Path, data: mmap.mmap, offsets: NDArray[np.uint64], id_hashes: NDArray[np.int64]) -> None:
    order = np.argsort(id_hashes, kind="stable")
    twins = np.flatnonzero(np.diff(id_hashes[order]) == 0)
    for twin in twins.tolist():
        rows = int(order[twin]), int(order[twin + 1])
        first, second = (str(orjson.loads(data[offsets[row] : offsets[row + 1]])["id"]) for row in rows)
        if first == second:
            lines = [_line_number(data, int(offsets[row])) for row in rows]
            raise StartError(f"{path} lines {lines[0]} and {lines[1]} share the id {first!r}: ids must be unique")


def _line_number(data: mmap.mmap, offset: int) -> int:
    """Of the line that starts there, from 1; read in pieces, since a corpus may be larger than the memory."""
    step = 1 << 20
    return 1 + sum(data[start : min(start + step, offset)].count(b"\n") for start in range(0, offset, step))
