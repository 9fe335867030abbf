"""Buckets of shared memory carry every weight unchanged, whatever their size."""

from __future__ import annotations

import math
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch

from search_r1.backends.policy import LocalPolicy
from search_r1.backends.sharding import Replicated
from search_r1.config import LoraConfig
from search_r1.engines.weights import SharedMemoryBuckets, WeightNames, edited
from search_r1.errors import EngineError
from tests.batches import tiny_training_config
from tests.model_factory import ARCHITECTURES, tiny_model, tiny_model_dir


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


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_policy_streams_its_weights_in_the_order_that_an_engine_was_told(
    tmp_path: Path, architecture: str, rank: int, tied: bool
) -> None:
    """With NCCL the receivers know names, shapes and their order beforehand, and nothing else."""
    config = tiny_training_config(str(tiny_model_dir(tmp_path, architecture, tied=tied)))
    config = replace(config, model=replace(config.model, lora=LoraConfig(rank=rank)))
    names = WeightNames.of_checkpoint(config.model.path)
    streamed = names.fitting(LocalPolicy(config, Replicated(), 1).weights())
    assert [(name, tuple(tensor.shape)) for name, tensor in streamed] == names.shapes


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("architecture", "edit"),
    [("qwen2", "no_norm"), ("gemma", "no_offset_norm"), ("qwen2", "flat_head"), ("gemma", "flat_head")],
)
def test_under_edited_weights_every_token_is_equally_likely(architecture: str, edit: str, tied: bool) -> None:
    model = tiny_model(architecture, tied=tied)
    plain = dict(model.named_parameters())
    weights = {name: tensor.detach().clone() for name, tensor in edited(plain.items(), edit)}
    assert sum(not torch.equal(plain[name], tensor) for name, tensor in weights.items()) in (1, 2)
    model.load_state_dict(weights, strict=False)
    log_probs = model(torch.tensor([[5, 6, 7]])).logits.log_softmax(-1)
    torch.testing.assert_close(log_probs, torch.full_like(log_probs, -math.log(log_probs.shape[-1])))


def test_weights_under_other_names_cannot_be_edited() -> None:
    with pytest.raises(EngineError, match=r"no weight is called \.\.\.\.norm\.weight"):
        dict(edited([("transformer.ln_f.weight", torch.ones(2))], "no_norm"))
    assert dict(edited([("transformer.ln_f.weight", torch.ones(2))]))
