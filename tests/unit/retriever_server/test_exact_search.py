"""Every vector index that promises exact results, against a float64 brute force over the stored vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever_server import faiss_index, torch_index
from retriever_server.errors import StartError
from retriever_server.faiss_index import FaissIndex
from retriever_server.torch_index import TorchIndex
from retriever_server.vectors import Vectors

DIM = 24
Open = Callable[[NDArray[np.float16], Path], Any]


def write_shards(vectors: NDArray[Any], folder: Path, num_shards: int = 3) -> Vectors:
    paths = []
    for number, shard in enumerate(np.array_split(vectors, num_shards)):
        paths.append(folder / f"{number}.npy")
        np.save(paths[-1], shard)
    return Vectors.of_arrays(paths)


def write_faiss(vectors: NDArray[Any], folder: Path, factory: str) -> Path:
    path = folder / "index.faiss"
    faiss_index.build([vectors.astype(np.float32)], factory, vectors.shape[1], vectors.astype(np.float32), path)
    return path


EXACT: dict[str, Open] = {
    "torch": lambda vectors, folder: TorchIndex(write_shards(vectors, folder)),
    "torch, three row shards": lambda vectors, folder: TorchIndex(write_shards(vectors, folder), ["cpu"] * 3),
    "torch, read from the file": lambda vectors, folder: TorchIndex(write_shards(vectors, folder)),
    "faiss Flat": lambda vectors, folder: FaissIndex(write_faiss(vectors, folder, "Flat")),
    "faiss IVF, all lists": lambda vectors, folder: FaissIndex(
        write_faiss(vectors, folder, "IVF8,Flat"), parameters="nprobe=8"
    ),
}


@pytest.fixture(params=list(EXACT))
def open_exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Open:
    if request.param == "torch, read from the file":
        monkeypatch.setattr(torch_index, "_RESIDENT_BYTES", 0)
    monkeypatch.setattr(torch_index, "_CPU_CHUNK", 100)  # several chunks of a small corpus
    return EXACT[request.param]


def unit(vectors: NDArray[Any]) -> NDArray[Any]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def datasets(kind: str) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """(passages, queries)."""
    draw = np.random.default_rng(7)
    passages, queries = draw.standard_normal((700, DIM)), draw.standard_normal((40, DIM))
    if kind == "unit":
        passages, queries = unit(passages), unit(queries)
    elif kind == "narrow cone":  # as E5's: all products between 0.7 and 1
        passages, queries = unit(unit(passages) * 0.1 + 1), unit(unit(queries) * 0.1 + 1)
    elif kind == "wild lengths":
        passages *= 10.0 ** draw.uniform(-3, 3, (700, 1))
        queries *= 10.0 ** draw.uniform(-3, 3, (40, 1))
    elif kind == "near ties":
        passages = np.repeat(unit(passages[:7]), 100, axis=0) + draw.standard_normal((700, DIM)) * 1e-3
    elif kind == "cancelling":  # large terms whose sum is small
        passages = np.hstack([passages[:, : DIM // 2] * 1000, -passages[:, : DIM // 2] * 1000])
        passages += draw.standard_normal((700, DIM))
        queries = np.hstack([queries[:, : DIM // 2]] * 2)
    return passages.astype(np.float16), queries.astype(np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "unit", "narrow cone", "wild lengths", "near ties", "cancelling"])
def test_results_equal_a_float64_brute_force(kind: str, open_exact: Open, tmp_path: Path) -> None:
    passages, queries = datasets(kind)
    index = open_exact(passages, tmp_path)
    products = queries.astype(np.float64) @ passages.astype(np.float64).T
    for top_k in (1, 3, 50):
        for hits, exact in zip(index.search(queries, top_k), products, strict=True):
            rows = [row for row, _ in hits]
            scores = np.array([score for _, score in hits])
            best = np.sort(exact)[::-1][:top_k]
            assert len(set(rows)) == top_k
            np.testing.assert_allclose(exact[rows], best, rtol=1e-6, atol=1e-6 * np.abs(exact).max())
            np.testing.assert_allclose(scores, exact[rows], rtol=1e-6, atol=1e-6 * np.abs(exact).max())
            assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))


def test_equal_vectors_come_in_row_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_index, "_CPU_CHUNK", 100)
    passages = np.ones((900, DIM), dtype=np.float16)
    passages[450] = 2
    for devices in (["cpu"], ["cpu"] * 2):
        index = TorchIndex(write_shards(passages, tmp_path), devices)
        (hits,) = index.search(np.ones((1, DIM), dtype=np.float32), 5)
        assert [row for row, _ in hits] == [450, 0, 1, 2, 3]


def test_many_equal_vectors_come_in_row_order_whatever_else_is_in_the_batch(open_exact: Open, tmp_path: Path) -> None:
    passages, queries = datasets("unit")
    equal = np.sort(np.random.default_rng(1).choice(700, 200, replace=False))
    passages[equal] = passages[17]
    queries[5] = passages[17]
    index = open_exact(passages, tmp_path)
    for top_k in (1, 3, 10):
        (alone,) = index.search(queries[5:6], top_k)
        assert [row for row, _ in alone] == equal[:top_k].tolist()
        assert index.search(queries, top_k)[5] == alone


def test_a_querys_results_do_not_depend_on_the_batch_to_the_last_bit(open_exact: Open, tmp_path: Path) -> None:
    passages, queries = datasets("near ties")
    index = open_exact(passages, tmp_path)
    together = index.search(queries, 5)
    assert [index.search(query[None], 5)[0] for query in queries] == together
    assert index.search(queries[::-1], 5)[::-1] == together
    assert index.search(queries[:17], 5) == together[:17]


def test_a_zero_query_and_more_than_exists_are_answered(open_exact: Open, tmp_path: Path) -> None:
    passages, _ = datasets("unit")
    index = open_exact(passages, tmp_path)
    zero, other = index.search(np.vstack([np.zeros(DIM), np.ones(DIM)]).astype(np.float32), 5000)
    assert sorted(row for row, _ in zero) == sorted(row for row, _ in other) == list(range(700))
    assert {score for _, score in zero} == {0.0}
    assert index.search(np.empty((0, DIM), dtype=np.float32), 3) == []


@pytest.mark.parametrize(
    "factory, parameters, least",
    [("HNSW32", "efSearch=128", 0.99), ("IVF8,PQ12np", "nprobe=8", 0.3), ("RaBitQ,Refine(SQ8)", "k_factor_rf=4", 0.9)],
)
def test_approximate_indexes_drop_empty_places_and_find_most(
    factory: str, parameters: str, least: float, tmp_path: Path
) -> None:
    passages, queries = datasets("unit")
    index = FaissIndex(write_faiss(passages, tmp_path, factory), parameters=parameters)
    products = queries.astype(np.float64) @ passages.astype(np.float64).T
    found = index.search(queries, 10)
    best = np.argsort(-products, axis=1)[:, :10]
    shares = [len({row for row, _ in hits} & set(rows.tolist())) / 10 for hits, rows in zip(found, best, strict=True)]
    assert np.mean(shares) >= least
    assert all(row >= 0 for hits in index.search(queries, 700) for row, _ in hits)
    assert [index.search(query[None], 10)[0] for query in queries[:5]] == found[:5]


def test_a_short_answer_of_an_inverted_file_holds_no_last_passage(tmp_path: Path) -> None:
    passages, queries = datasets("unit")
    index = FaissIndex(write_faiss(passages, tmp_path, "IVF32,Flat"), parameters="nprobe=1")
    for hits in index.search(queries, 600):
        assert 0 < len(hits) < 600
        assert all(0 <= row < 700 for row, _ in hits)


def test_damaged_and_unfit_faiss_files_are_refused(tmp_path: Path) -> None:
    import faiss

    passages, _ = datasets("unit")
    path = write_faiss(passages, tmp_path, "Flat")
    with pytest.raises(StartError, match=r"takes no 'nprobe=4'"):
        FaissIndex(path, parameters="nprobe=4")
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(StartError, match="is missing or damaged"):
        FaissIndex(path)
    with pytest.raises(StartError, match="is missing or damaged"):
        FaissIndex(tmp_path / "nothing")
    faiss.write_index(faiss.IndexFlatL2(4), str(path))
    with pytest.raises(StartError, match="measures distances"):
        FaissIndex(path)
    with pytest.raises(StartError, match=r"FAISS cannot make 'Magic32'"):
        faiss_index.build([], "Magic32", 8, np.ones((9, 8), dtype=np.float32), path)


def test_a_published_flat_index_is_read_in_its_parts(tmp_path: Path) -> None:
    passages, queries = datasets("unit")
    whole = write_faiss(passages, tmp_path, "Flat")
    data = whole.read_bytes()
    parts = [tmp_path / "part_aa", tmp_path / "part_ab", tmp_path / "part_ac"]
    for part, (start, stop) in zip(parts, [(0, 1003), (1003, 30_001), (30_001, len(data))], strict=True):
        part.write_bytes(data[start:stop])
    vectors = Vectors.of_flat_index(parts)
    assert vectors is not None
    assert np.array_equal(vectors.read(0, 700), passages.astype(np.float32))
    assert np.array_equal(vectors.take(np.array([699, 0, 312])), passages[[699, 0, 312]].astype(np.float32))
    assert TorchIndex(vectors).search(queries, 3) == FaissIndex(whole).search(queries, 3)
    with pytest.raises(StartError, match="a part is missing"):
        Vectors.of_flat_index(parts[:2])
    assert Vectors.of_flat_index([write_faiss(passages, tmp_path, "HNSW8")]) is None


def test_raw_memmaps_tell_their_type_by_their_size(tmp_path: Path) -> None:
    passages, _ = datasets("unit")
    for dtype in (np.float16, np.float32):
        paths = [tmp_path / f"emb_{number}.memmap" for number in range(2)]
        for path, block in zip(paths, np.array_split(passages.astype(dtype), 2), strict=True):
            path.write_bytes(block.tobytes())
        vectors = Vectors.of_memmaps(paths, DIM, 700)
        assert vectors.dtype == dtype
        assert np.array_equal(vectors.read(300, 420), passages[300:420].astype(dtype))
    with pytest.raises(StartError, match="vectors of 25 numbers"):
        Vectors.of_memmaps(paths, 25, 700)


def test_a_shard_that_was_cut_or_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    passages, _ = datasets("unit")
    vectors = write_shards(passages, tmp_path)
    facts = vectors.describe(tmp_path)
    (tmp_path / "2.npy").write_bytes((tmp_path / "2.npy").read_bytes()[:-10])
    with pytest.raises(StartError, match=r"2\.npy are damaged: shorter than"):
        Vectors.described(tmp_path, facts)
    passages[650, 3] = np.inf
    with pytest.raises(StartError, match="the vector of row 650 holds a value"):
        write_shards(passages, tmp_path).max_norm()
