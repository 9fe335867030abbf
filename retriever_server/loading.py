"""Which retriever the command line asks for. The one place that knows all of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from retriever_server.errors import StartError
from retriever_server.retriever import Reranker, Retriever

_PARTS = {
    "bm25": "index",
    "lucene": "index",
    "dense": "index",
    "remote": "url",
    "opensearch": "collection",
    "qdrant": "collection",
}
"""What --parts may hold, and the option that its value stands for."""

KINDS = ("bm25", "lucene", "dense", "hybrid", "remote", "opensearch", "qdrant", "web", "noise")


def number(kind: type[int] | type[float], least: float, most: float = 1_000_000_000) -> Callable[[str], float]:
    """A reader of an option's value that refuses what lies outside."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:,} and {most:,}")
        return value

    read.__name__ = kind.__name__  # argparse calls it by that
    return read


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--retriever", choices=KINDS, default="bm25")
    add("--corpus", type=Path, help="JSON lines, one passage a line; plain or .gz")
    add("--index", type=Path, help="folder of the index (bm25: built there when it does not exist)")
    add("--k1", type=number(float, 0), help="bm25, lucene (default: 0.9, or what --index was built with)")
    add("--b", type=number(float, 0, 1), help="bm25, lucene (default: 0.4, or what --index was built with)")
    lucene = parser.add_argument_group("lucene").add_argument
    lucene("--anserini-jar", type=Path, help="Anserini's fat jar (default: $ANSERINI_JAR, or the pyserini package's)")
    lucene("--java-heap", default="2g", help="the Java process's memory (default: 2g)")
    lucene("--java-threads", type=number(int, 1), default=1, help="threads that search a batch (default: 1)")
    dense = parser.add_argument_group("dense, qdrant").add_argument
    dense("--encoder", help="folder or hub name of the model that encoded the passages")
    dense("--profile", choices=("e5", "bge", "contriever", "minilm"), help="qdrant: how the encoder wants its text")
    dense("--backend", choices=("auto", "torch", "faiss"), default="auto", help="auto: FAISS where the index names one")
    dense("--device", default="cpu", help="of the encoder and of exact search, e.g. cuda:0 or cuda:0,cuda:1")
    dense("--faiss-parameters", default="", help='e.g. "nprobe=64" or "efSearch=128"')
    dense("--faiss-gpu", type=_numbers, default="", help="GPUs to copy a FAISS index to, e.g. 0,1 (needs faiss-gpu)")
    hybrid = parser.add_argument_group("hybrid").add_argument
    hybrid(
        "--parts",
        nargs=2,
        metavar="KIND=WHAT",
        help="bm25=, lucene=, dense= an index folder, remote= a URL, opensearch=, qdrant= a collection at --url",
    )
    hybrid("--fusion", choices=("rrf", "weighted"), default="rrf", help="by rank or by score (default: rrf)")
    hybrid("--weights", nargs=2, type=number(float, 0), default=(1.0, 1.0), help="of the two parts (default: 1 1)")
    remote = parser.add_argument_group("remote, opensearch, qdrant, web").add_argument
    remote("--url", help="of the engine behind; qdrant: a folder opens the local mode; web: another address")
    remote("--collection", help="opensearch: the index; qdrant: the collection")
    remote("--provider", choices=("google", "serpapi", "serper", "tavily"), default="serper", help="web")
    remote("--web-cache", type=Path, default=Path("web_cache.sqlite"), help="answers kept (default: web_cache.sqlite)")
    remote("--requests-per-s", type=number(float, 0.001), default=5.0, help="web (default: 5)")
    remote("--requests-per-day", type=number(int, 0), default=1000, help="web (default: 1000)")
    rerank = parser.add_argument_group("reranking, around any retriever").add_argument
    rerank("--rerank", metavar="MODEL", help="cross-encoder, folder or hub name; also answers POST /rerank")
    rerank("--rerank-depth", type=number(int, 1), default=50, help="passages it reads a query (default: 50)")
    noise = parser.add_argument_group("noise").add_argument
    noise("--noise", choices=("empty", "random", "shuffled"), default="empty", help="what comes (default: empty)")
    noise("--seed", type=int, default=0, help="(default: 0)")


def load(options: argparse.Namespace) -> tuple[Retriever, Reranker | None]:
    """The retriever, with the reranker around it where one is named.

    Raises:
        StartError: an option is missing, or a file is missing, damaged or another one than it should be.
    """
    retriever = _load(options, options.retriever, options.index)
    if options.rerank is None:
        return retriever, None
    from retriever_server.cross_encoder import CrossEncoder
    from retriever_server.reranking import RerankRetriever

    reranker = CrossEncoder(options.rerank, _devices(options)[0])
    return RerankRetriever(retriever, reranker, Path(options.rerank).name, options.rerank_depth), reranker


def _load(options: argparse.Namespace, kind: str, index: Path | None) -> Retriever:
    # Imported where needed: a wrong flag is told, and --help answers, without loading torch.
    if kind == "noise":
        return _load_noise(options)
    if kind == "hybrid":
        return _load_hybrid(options)
    if kind in ("remote", "opensearch", "qdrant", "web"):
        return _load_remote(options, kind)
    if kind == "bm25":
        from retriever_server.bm25 import open_or_build

        return open_or_build(_corpus(options), index, k1=options.k1, b=options.b)
    if index is None:
        raise StartError(f"--index is missing: {kind} opens one that build_index or others have made")
    if kind == "lucene":
        from retriever_server.lucene import LuceneRetriever, open_corpus

        return LuceneRetriever(
            index,
            None if options.corpus is None else open_corpus(index, options.corpus),
            jar=options.anserini_jar,
            k1=0.9 if options.k1 is None else options.k1,
            b=0.4 if options.b is None else options.b,
            heap=options.java_heap,
            threads=options.java_threads,
        )
    from retriever_server import dense

    return dense.load(
        index,
        _corpus(options),
        _encoder_name(options),
        backend=options.backend,
        devices=_devices(options),
        parameters=options.faiss_parameters,
        faiss_gpus=options.faiss_gpu,
    )


def _load_noise(options: argparse.Namespace) -> Retriever:
    from retriever_server.noise import EmptyRetriever, RandomRetriever, ShuffledRetriever

    if options.noise == "empty":
        return EmptyRetriever()
    if options.noise == "random":
        from retriever_server.corpus import Corpus

        return RandomRetriever(Corpus.open(_corpus(options)), options.seed)
    from retriever_server.bm25 import open_or_build

    bm25 = open_or_build(_corpus(options), options.index, k1=options.k1, b=options.b)
    return ShuffledRetriever(bm25, options.seed)


def _load_hybrid(options: argparse.Namespace) -> Retriever:
    from retriever_server.hybrid import HybridRetriever

    if options.parts is None:
        raise StartError("--parts is missing: name two retrievers, e.g. --parts bm25=bm25_index dense=e5_index")
    loaded = []
    for part in options.parts:
        kind, _, what = part.partition("=")
        if kind not in _PARTS or not what:
            raise StartError(f"--parts {part}: expected one of {', '.join(_PARTS)}, then = and what to open")
        asked = {**vars(options), _PARTS[kind]: Path(what) if _PARTS[kind] == "index" else what}
        own = argparse.Namespace(**asked)
        loaded.append(_load(own, kind, own.index))
    return HybridRetriever((loaded[0], loaded[1]), fusion=options.fusion, weights=tuple(options.weights))


def _load_remote(options: argparse.Namespace, kind: str) -> Retriever:
    if kind == "web":
        from retriever_server.web import WebRetriever

        return WebRetriever(
            options.provider,
            options.web_cache,
            requests_per_s=options.requests_per_s,
            requests_per_day=options.requests_per_day,
            url=options.url,
        )
    if options.url is None:
        raise StartError(f"--url is missing: where the {kind} server answers")
    if kind == "remote":
        from retriever_server.remote import RemoteRetriever

        return RemoteRetriever(options.url)
    if options.collection is None:
        raise StartError(f"--collection is missing: which one of {kind} to search")
    if kind == "opensearch":
        from retriever_server.remote import OpenSearchRetriever

        return OpenSearchRetriever(options.url, options.collection)
    if options.profile is None:
        raise StartError("--profile is missing: how the encoder wants its text")
    from retriever_server.dense import profile_named
    from retriever_server.encoder import Encoder
    from retriever_server.qdrant import QdrantRetriever, connect

    encoder = Encoder(_encoder_name(options), profile_named(options.profile), _devices(options)[0])
    return QdrantRetriever(connect(options.url, os.environ.get("QDRANT_API_KEY")), options.collection, encoder)


def _corpus(options: argparse.Namespace) -> Path:
    if options.corpus is None:
        raise StartError("--corpus is missing: name a file of JSON lines with id and contents")
    corpus: Path = options.corpus
    return corpus


def _encoder_name(options: argparse.Namespace) -> str:
    if options.encoder is None:
        raise StartError("--encoder is missing: the model that encoded the passages, a folder or hub name")
    return str(options.encoder)


def _devices(options: argparse.Namespace) -> list[str]:
    return str(options.device).split(",")
