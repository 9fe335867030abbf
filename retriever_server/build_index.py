"""`python -m retriever_server.build_index`: build, import, inspect and verify indexes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from retriever_server import loading
from retriever_server.building import MANIFEST, manifest_of
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError
from retriever_server.retriever import Retriever

logger = logging.getLogger("retriever_server")

_COMMANDS = ("build", "import", "inspect", "verify")
_SAMPLES = 100
_KNOWN_TOP_K = 10
_QUERY_WORDS = 32
_LEAST_FOUND = 0.5
_EXAMPLES = """\
examples:
  python -m retriever_server.build_index --retriever bm25 --corpus corpus.jsonl --index bm25_index
  python -m retriever_server.build_index --retriever lucene --corpus corpus.jsonl --index lucene_index
  python -m retriever_server.build_index --retriever dense --corpus corpus.jsonl --index e5_index \\
      --encoder intfloat/e5-base-v2 --profile e5 --device cuda:0     # and --factory HNSW32,SQ8 for a FAISS index
  python -m retriever_server.build_index import --corpus corpus.jsonl --index e5_index \\
      --encoder intfloat/e5-base-v2 --profile e5 part_aa part_ab        # published parts, read where they lie
  python -m retriever_server.build_index import --corpus corpus.jsonl --index lucene_index folder_of_pyserini
  python -m retriever_server.build_index inspect e5_index
  python -m retriever_server.build_index verify e5_index --corpus corpus.jsonl --encoder intfloat/e5-base-v2

An interrupted build goes on where it stopped when the same command is given again.
Exit code: 0, or 2 when a file or a setting is wrong or the index does not find its own passages."""


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0].startswith("-"):
        arguments = arguments if arguments[:1] in (["-h"], ["--help"]) else ["build", *arguments]
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        {"build": _build, "import": _import, "inspect": _inspect, "verify": _verify}[options.command](options)
    except StartError as error:
        logger.error("%s", error)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m retriever_server.build_index",
        description="Build (the command in force where none is named), import, inspect and verify indexes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(_COMMANDS) + "}")
    build = commands.add_parser("build", help="make an index of a corpus")
    build.add_argument("--factory", help='dense: FAISS factory string, e.g. "HNSW32" (default: exact search)')
    build.add_argument(
        "--workers", type=loading.number(int, 1), help="bm25: processes; lucene: threads (default: one a core)"
    )
    build.add_argument("--store-raw", action="store_true", help="lucene: keep the passages in the index too")
    take_in = commands.add_parser("import", help="make an index folder of what exists: its files stay where they are")
    take_in.add_argument(
        "sources", nargs="+", type=Path, help="Lucene folder, FAISS index (Flat: also its parts), .memmap, .npy"
    )
    take_in.add_argument("--convert", action="store_true", help="copy vectors into float16 shards, half of float32")
    for command in (build, take_in):
        command.add_argument("--passage-tokens", type=loading.number(int, 1), help="dense: if not the profile's")
        command.add_argument("--no-verify", action="store_true", help="skip the known-item queries at the end")
    inspect = commands.add_parser("inspect", help="print what an index folder says of itself, as JSON")
    inspect.add_argument("folder", type=Path)
    verify = commands.add_parser("verify", help="ask for passages by their own words")
    verify.add_argument("folder", type=Path)
    for command in (build, take_in, verify):
        loading.add_options(command)
    return parser


def _build(options: argparse.Namespace) -> None:
    if options.retriever == "qdrant":
        _upload(options)
        return
    corpus, folder = _corpus_and_folder(options)
    if options.retriever == "bm25":
        from retriever_server import bm25_build

        k1, b = (0.9 if options.k1 is None else options.k1), (0.4 if options.b is None else options.b)
        bm25_build.build(corpus, folder, k1=k1, b=b, workers=options.workers)
    elif options.retriever == "lucene":
        from retriever_server import lucene_build

        lucene_build.build(
            corpus,
            folder,
            jar=options.anserini_jar,
            threads=options.workers,
            store_raw=options.store_raw,
            heap=options.java_heap,
        )
    elif options.retriever == "dense":
        from retriever_server import dense_build

        dense_build.build(corpus, folder, _encoder(options), factory=options.factory)
    else:
        raise StartError(f"there is no index to build for {options.retriever}: bm25, lucene, dense or qdrant")
    _check(options, corpus, folder)


def _upload(options: argparse.Namespace) -> None:
    if options.corpus is None or options.url is None or options.collection is None:
        raise StartError("--corpus, --url and --collection are needed: what to upload, and where")
    from retriever_server.qdrant import connect, upload

    client = connect(options.url, os.environ.get("QDRANT_API_KEY"))
    upload(client, options.collection, Corpus.open(options.corpus), _encoder(options))
    client.close()


def _import(options: argparse.Namespace) -> None:
    corpus, folder = _corpus_and_folder(options)
    if len(options.sources) == 1 and options.sources[0].is_dir():
        from retriever_server import lucene_build

        options.retriever = "lucene"
        lucene_build.import_folder(corpus, folder, options.sources[0])
        _check(options, corpus, folder)
        return
    from retriever_server import dense_build

    options.retriever = "dense"
    dense_build.import_vectors(corpus, folder, _encoder(options), options.sources, convert=options.convert)
    _check(options, corpus, folder)


def _inspect(options: argparse.Namespace) -> None:
    manifest = _manifest(options.folder)
    files = sorted(path for path in options.folder.rglob("*") if path.is_file())
    facts = {**manifest, "files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")


def _verify(options: argparse.Namespace) -> None:
    options.retriever = str(_manifest(options.folder).get("retriever"))
    options.no_verify = False
    if options.corpus is None:
        raise StartError("--corpus is missing: the file the index was built from")
    _check(options, Corpus.open(options.corpus), options.folder)


def _check(options: argparse.Namespace, corpus: Corpus, folder: Path) -> None:
    logger.info("%s is written", folder)
    if options.no_verify:
        return
    options.index, options.rerank = folder, None
    retriever, _ = loading.load(options)
    found = known_items_found(retriever, corpus)
    message = f"{found:.0%} of the sampled passages are found by their own first {_QUERY_WORDS} words"
    if found < _LEAST_FOUND:
        raise StartError(f"{folder}: only {message}: it was built from another corpus or by another encoder")
    logger.info("%s: %s", folder, message)


def known_items_found(retriever: Retriever, corpus: Corpus, samples: int = _SAMPLES) -> float:
    """Share of evenly spaced passages among the best ten for a query made of their own first words."""
    rows = np.unique(np.linspace(0, len(corpus) - 1, samples, dtype=np.int64)).tolist()
    texts = [next(corpus.texts(row, row + 1)) for row in rows]
    queries = [" ".join(text.split()[:_QUERY_WORDS]) for text in texts]
    found = retriever.search(queries, _KNOWN_TOP_K)
    known = [
        corpus.id_of(row) in {str(orjson.loads(passage.document)["id"]) for passage in passages}
        for row, passages in zip(rows, found, strict=True)
    ]
    return sum(known) / len(known)


def _manifest(folder: Path) -> dict[str, Any]:
    if (folder / MANIFEST).exists():
        return manifest_of(folder)
    if any(folder.glob("segments_*")):
        from retriever_server.lucene import commit_fingerprint

        return {"retriever": "lucene", "commit": commit_fingerprint(folder)}
    raise StartError(f"{folder} is no index folder: neither a {MANIFEST} nor Lucene's segments are there")


def _corpus_and_folder(options: argparse.Namespace) -> tuple[Corpus, Path]:
    if options.corpus is None or options.index is None:
        raise StartError("--corpus and --index are needed: the file of passages, and the folder to write")
    if options.index.exists():
        raise StartError(f"{options.index} exists already")
    logger.info("reading %s", options.corpus)
    return Corpus.open(options.corpus), options.index


def _encoder(options: argparse.Namespace) -> Any:
    if options.encoder is None or options.profile is None:
        raise StartError("--encoder and --profile are needed: the model, and how it wants its text")
    from retriever_server.dense import profile_named
    from retriever_server.encoder import Encoder

    device = str(options.device).split(",")[0]
    return Encoder(options.encoder, profile_named(options.profile, options.passage_tokens), device)


if __name__ == "__main__":
    sys.exit(main())
