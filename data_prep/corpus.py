"""Articles to a corpus of short passages: chunks of 100 words under their title, repeated ones dropped."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from rich.progress import Progress

from data_prep.cli import console, count_table, existing_file, exit_code, parser, whole_file
from search_r1.errors import DataError

EXAMPLES = """\
  python -m data_prep.corpus articles.jsonl.gz --output corpus.jsonl
  python -m data_prep.corpus passages.jsonl more.jsonl --words 0 --keep-ids --output corpus.jsonl.gz"""


@dataclass(frozen=True, slots=True)
class Article:
    """A title and its text; `article_id` is the input's, empty when it gave none."""

    title: str
    text: str
    article_id: str = ""


@dataclass(slots=True)
class Chunker:
    """Cuts articles into passages and counts. Repeated passages are known by an 8-byte hash of title and text."""

    words: int = 100
    """A passage; the last one of an article may be shorter. 0 keeps each article whole."""
    counts: Counter[str] = field(default_factory=Counter)
    _seen: set[int] = field(default_factory=set)

    def passages(self, articles: Iterable[Article]) -> Iterator[Article]:
        """The passages of all articles, in order, each once. White space becomes single blanks."""
        for article in articles:
            self.counts["articles"] += 1
            words = article.text.split()
            if not words:
                self.counts["dropped: no text"] += 1
            size = self.words or max(1, len(words))
            for start in range(0, len(words), size):
                text = " ".join(words[start : start + size])
                key = hashlib.blake2b(f"{article.title}\n{text}".encode(), digest_size=8).digest()
                if (number := int.from_bytes(key)) in self._seen:
                    self.counts["dropped: repeated passage"] += 1
                    continue
                self._seen.add(number)
                self.counts["passages"] += 1
                yield Article(article.title, text, article.article_id)


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of `"Title"\\ntext`: the first line without its quotes, then the rest. A single line is the text,
    unless it stands in quotes."""
    title, newline, text = contents.strip("\r\n").partition("\n")
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        return title[1:-1], text
    return (title, text) if newline else ("", title)


def parse_article(line: bytes, where: str) -> Article:
    """One JSON line: `{"id", "title", "text"}` or `{"id", "contents"}`. Raises `DataError` naming `where`."""
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
        if rb"\u" in line:  # perhaps half a surrogate pair, which has no encoding
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error})") from None
    if not isinstance(row, dict) or not (isinstance(row.get("contents"), str) or isinstance(row.get("text"), str)):
        raise DataError(f"{where} has neither contents nor title and text")
    title, text = row.get("title"), row.get("text")
    if isinstance(row.get("contents"), str):
        first_line, text = split_contents(row["contents"])
        title = first_line or title
    article_id = "" if row.get("id") is None else str(row["id"])
    return Article(" ".join(str(title or "").split("\n")).strip(), str(text), article_id)


def read_articles(paths: Iterable[Path], progress: Progress) -> Iterator[Article]:
    for path in paths:
        task = progress.add_task(path.name, total=path.stat().st_size)
        with path.open("rb") as raw:
            lines = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield parse_article(line, f"{path}: line {number}")
                    if number % 1000 == 0:
                        progress.update(task, completed=raw.tell())
            except (EOFError, zlib.error) as error:
                raise DataError(f"{path}: the file is cut short ({error})") from None
        progress.update(task, completed=path.stat().st_size)


def write_corpus(passages: Iterable[Article], path: str | Path, keep_ids: bool) -> None:
    """`{"id", "contents": "\\"Title\\"\\ntext"}` lines; ids count from 0 unless kept. Raises `DataError` on a repeated
    or missing id that was to be kept."""
    taken: set[str] = set()
    with whole_file(path) as temporary:
        opener = gzip.open if str(path).endswith(".gz") else open
        with opener(temporary, "wt", encoding="utf-8", newline="\n") as sink:
            for number, passage in enumerate(passages):
                passage_id = passage.article_id if keep_ids else str(number)
                if keep_ids and (not passage_id or passage_id in taken):
                    raise DataError(f"passage {number + 1}: its id {passage_id!r} is empty or taken; drop --keep-ids")
                if keep_ids:
                    taken.add(passage_id)
                row = {"id": passage_id, "contents": f'"{passage.title}"\n{passage.text}'}
                sink.write(json.dumps(row, ensure_ascii=False) + "\n")


def command(arguments: argparse.Namespace) -> None:
    if arguments.keep_ids and arguments.words:
        raise DataError("--keep-ids needs --words 0: the passages cut from one article would share its id")
    paths = [existing_file(path) for path in arguments.inputs]
    chunker = Chunker(arguments.words)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        write_corpus(chunker.passages(read_articles(paths, progress)), arguments.output, arguments.keep_ids)
    console.print(count_table("corpus", dict(chunker.counts)))
    console.print(f"wrote {arguments.output}")


def _words(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def main(argv: list[str] | None = None) -> int:
    options = parser("corpus", __doc__, EXAMPLES)
    options.add_argument("inputs", nargs="+", help="JSON lines, plain or .gz: id, title, text or id, contents")
    options.add_argument("--output", required=True, help="the corpus to write: .jsonl or .jsonl.gz")
    options.add_argument("--words", type=_words, default=100, help="of a passage; 0 keeps texts whole (default: 100)")
    options.add_argument("--keep-ids", action="store_true", help="keep the ids of the input instead of counting anew")
    return exit_code(command, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
