"""Buckets of shared memory carry every weight unchanged, whatever their size."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

from search_r1.engines.weights import SharedMemoryBuckets


def received(bucket) -> dict[str, torch.Tensor]:
    memory = SharedMemory(bucket["block"])
    data, dtype = bytes(memory.buf), getattr(torch, bucket["dtype"])
    memory.close()
    return {
        name: torch.frombuffer(bytearray(data), dtype=dtype, count=torch.Size(shape).numel(), offset=offset).view(shape)
        for name, shape, offset in zip(bucket["names"], bucket["shapes"], bucket["offsets"], strict=True)
    }


@pytest.mark.parametrize("bucket_bytes, num_buckets", [(1 << 20, 1), (4096, 3), (16, 8)])
def test_weights_arrive_whole_in_as_many_buckets_as_they_need(bucket_bytes, num_buckets):
    weights = {f"w{n}": torch.randn(10 * n + 1, 7) for n in range(8)}
    buckets = SharedMemoryBuckets(torch.float32, bucket_bytes)
    arrived, count = {}, 0
    for bucket in buckets.pack(weights.items()):
        arrived.update(received(bucket))
        count += 1
    buckets.close()
    assert list(arrived) == list(weights)
    assert all(torch.equal(arrived[name], weight) for name, weight in weights.items())
    assert count >= num_buckets


def test_weights_are_cast_to_the_engines_dtype():
    weight = torch.randn(5, 3)
    buckets = SharedMemoryBuckets(torch.bfloat16)
    (bucket,) = buckets.pack([("w", weight.T)])
    assert torch.equal(received(bucket)["w"], weight.T.bfloat16())
    buckets.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(bucket["block"])
