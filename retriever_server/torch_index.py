"""Exact inner-product search in torch: products in chunks with a running top-k, then an exact score for the survivors.

The products are rounded, so they only choose candidates. Candidates are scored again in float64 from the stored vectors
and returned as float32; a query is done when its last hit beats everything that was left out by more than the rounding
could have hidden, and is otherwise searched again with more candidates. The answer is thus the exact one, whatever else
is in the batch and however the rows are spread over devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retriever_server.encoder import device_named
from retriever_server.errors import StartError
from retriever_server.vectors import Vectors

_MIN_CANDIDATES = 64
_MAX_CANDIDATES = 32_768
"""Where more passages than this lie within rounding of the last hit, which of them are returned is left open."""
_CPU_CHUNK, _CUDA_CHUNK = 65_536, 524_288
_RESIDENT_BYTES = 2 << 30
"""On a CPU, vectors below this size stay in memory as float32; larger ones are read from the file by each search."""
_FLOAT16_MAX_NORM = 60_000.0


@dataclass(frozen=True, slots=True)
class _Shard:
    """Rows from `start` to before `stop` on one device; `tensor` is None where they are read from the file."""

    device: torch.device
    start: int
    stop: int
    tensor: torch.Tensor | None


class TorchIndex:
    """Rows are spread evenly over the devices and each device is filled slice by slice from the file.

    Args:
        devices: e.g. ("cpu",) or ("cuda:0", "cuda:1"). GPUs keep float16, halving float32 files on the way.
        max_norm: length of the longest vector, from the manifest; None measures it, reading everything once.
    """

    def __init__(self, vectors: Vectors, devices: Sequence[str] = ("cpu",), *, max_norm: float | None = None) -> None:
        self._vectors = vectors
        self._max_norm = vectors.max_norm() if max_norm is None else max_norm
        self._half = any(device != "cpu" for device in devices)
        if self._half and self._max_norm > _FLOAT16_MAX_NORM:
            raise StartError(f"vectors as long as {self._max_norm:.0f} do not fit float16: use --device cpu")
        if self._half:
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._chunk = _CUDA_CHUNK if self._half else _CPU_CHUNK
        edges = [len(vectors) * part // len(devices) for part in range(len(devices) + 1)]
        self._shards = [
            self._fill(device_named(device), start, stop)
            for device, start, stop in zip(devices, edges, edges[1:], strict=False)
        ]

    def __len__(self) -> int:
        return len(self._vectors)

    def describe(self) -> dict[str, Any]:
        places = [f"{shard.device}{'' if shard.tensor is not None else ' (memory-mapped)'}" for shard in self._shards]
        return {"index": "exact", "rows": len(self), "dim": self._vectors.dim, "devices": places}

    @torch.inference_mode()
    def search(self, queries: NDArray[np.float32], top_k: int) -> list[list[tuple[int, float]]]:
        """(row, inner product) of the best passages, best first, equal ones by row; one list a query.

        Args:
            queries: (n, dim).
        """
        top_k = min(top_k, len(self))
        results: list[list[tuple[int, float]]] = [[] for _ in queries]
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        unit = (queries / np.where(norms == 0, 1, norms)[:, None]).astype(np.float32)
        pending = np.arange(len(queries))
        count = max(_MIN_CANDIDATES, 4 * top_k)
        while len(pending) and top_k:
            rows, best_left_out = self._candidates(torch.from_numpy(unit[pending]), count)
            scores = self._exact(queries[pending], rows)
            order = np.lexsort((rows, -scores))[:, :top_k]
            rows, scores = np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)
            last = scores[:, -1] / np.where(norms[pending] == 0, 1, norms[pending])
            done = (last > best_left_out + self._rounding()) | (count >= _MAX_CANDIDATES)
            for place in np.flatnonzero(done).tolist():
                pairs = zip(rows[place].tolist(), scores[place].astype(np.float32).tolist(), strict=True)
                results[pending[place]] = list(pairs)
            pending, count = pending[~done], count * 8
        return results

    def _rounding(self) -> float:
        """Twice an upper bound of what a product of a unit query loses to rounding (Higham 2002, section 3.1)."""
        dim, half, single = self._vectors.dim, 2.0**-11, 2.0**-24
        error = (dim + 2) * single
        if self._half:  # the query and the product are rounded too; tensor cores add less carefully
            error = 2 * half + 4 * dim * single + dim**0.5 * 2.0**-25
        return 2 * error * self._max_norm

    def _fill(self, device: torch.device, start: int, stop: int) -> _Shard:
        dim = self._vectors.dim
        if device.type == "cpu" and 4 * dim * (stop - start) > _RESIDENT_BYTES:
            return _Shard(device, start, stop, None)
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        tensor = torch.empty((stop - start, dim), dtype=dtype, device=device)
        for begin in range(start, stop, _CPU_CHUNK):
            end = min(begin + _CPU_CHUNK, stop)
            block = np.ascontiguousarray(self._vectors.read(begin, end))
            tensor[begin - start : end - start] = torch.from_numpy(block if block.flags.writeable else block.copy())
        return _Shard(device, start, stop, tensor)

    def _chunk_of(self, shard: _Shard, start: int, stop: int) -> torch.Tensor:
        if shard.tensor is not None:
            return shard.tensor[start - shard.start : stop - shard.start]
        return torch.from_numpy(self._vectors.read(start, stop).astype(np.float32))

    def _candidates(self, unit: torch.Tensor, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The `count` best rows of every shard by rounded products.

        Returns:
            (n, shards · count) rows, and for each query the best rounded product among the rows that were left out.
        """
        under_way = [self._best_of_shard(unit, shard, count) for shard in self._shards]  # GPUs run side by side
        rows, left_out = [], np.full(len(unit), -np.inf)
        for shard, (values, places) in zip(self._shards, under_way, strict=True):
            rows.append(places.cpu().numpy() + shard.start)
            if shard.stop - shard.start > count:
                left_out = np.maximum(left_out, values[:, -1].double().cpu().numpy())
        return np.concatenate(rows, axis=1), left_out

    def _best_of_shard(self, unit: torch.Tensor, shard: _Shard, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, count) products, falling, and their places in the shard."""
        query = unit.to(shard.device, torch.float16 if shard.device.type != "cpu" else torch.float32)
        values = torch.empty((len(unit), 0), dtype=query.dtype, device=shard.device)
        places = torch.empty((len(unit), 0), dtype=torch.long, device=shard.device)
        for start in range(shard.start, shard.stop, self._chunk):
            stop = min(start + self._chunk, shard.stop)
            products = query @ self._chunk_of(shard, start, stop).T
            new_values, new_places = products.topk(min(count, stop - start), dim=1)
            values = torch.cat([values, new_values], dim=1)
            places = torch.cat([places, new_places + (start - shard.start)], dim=1)
            values, kept = values.topk(min(count, values.shape[1]), dim=1)
            places = places.gather(1, kept)
        return values, places

    def _exact(self, queries: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """(n, m) inner products of each query with its own rows, in float64 rounded to float32."""
        scores = np.empty(rows.shape)
        for place, own in enumerate(rows):
            query = torch.from_numpy(queries[place])
            for shard in self._shards:
                here = np.flatnonzero((own >= shard.start) & (own < shard.stop))
                if not len(here):
                    continue
                if shard.tensor is None:
                    vectors = torch.from_numpy(self._vectors.take(own[here]))
                else:
                    vectors = shard.tensor[torch.from_numpy(own[here] - shard.start).to(shard.device)]
                products = (vectors.double() * query.to(shard.device).double()).sum(1)
                scores[place, here] = products.float().cpu().numpy()
        return scores
