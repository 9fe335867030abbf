from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from search_r1.cluster import weight_sync
from search_r1.config import Config


def test_the_object_store_carries_weights_in_the_engines_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, torch.Tensor]] = []
    monkeypatch.setattr(weight_sync, "send_weights", lambda buckets, _: sent.extend(w for b in buckets for w in b))
    weights = {"a": torch.tensor([1.0 + 2**-12]), "b": torch.ones(2, 2)}
    policy = SimpleNamespace(weights=lambda: iter(weights.items()), sharding=SimpleNamespace(rank=0))
    weight_sync.build_sender(Config(), policy, None, "shm", "bfloat16").send([])
    assert [(name, tensor.dtype) for name, tensor in sent] == [("a", torch.bfloat16), ("b", torch.bfloat16)]
