from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from search_r1.backends import packing
from search_r1.backends.critic import LocalCritic
from search_r1.backends.model import attention_implementation
from search_r1.backends.packing import VARLEN, pack, varlen_attention
from search_r1.backends.policy import LocalPolicy
from search_r1.backends.sharding import Replicated
from search_r1.config import Config, ModelConfig
from search_r1.types import TrainBatch
from tests.batches import random_batch, tiny_training_config, with_policy
from tests.model_factory import ARCHITECTURES, tiny_model_dir

LENGTHS = (9, 14, 6, 11, 4)


def packed(config: Config, max_tokens: int = 10_000) -> Config:
    critic = replace(config.critic, max_tokens_per_micro_batch=max_tokens)
    return replace(with_policy(config, packing="packed", max_tokens_per_micro_batch=max_tokens), critic=critic)


def step_gradient(role: LocalPolicy | LocalCritic, batch: TrainBatch) -> Tensor:
    kept: list[Tensor] = []
    parameters = list(role.module.parameters())
    role.trainable.optimizer.register_step_pre_hook(
        lambda *_: kept.append(
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        )
    )
    role.update(batch)
    return kept[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_log_probs_and_values_are_those_of_padded_rows(tmp_path: Path, architecture: str) -> None:
    config = tiny_training_config(str(tiny_model_dir(tmp_path, architecture)))
    batch = random_batch(LENGTHS).rollout
    for role, method in ((LocalPolicy, "log_probs"), (LocalCritic, "values")):
        torch.manual_seed(0)
        padded_role = role(config, Replicated(), 1)
        packed_role = role(packed(config, 21), Replicated(), 1)
        if isinstance(padded_role, LocalCritic):
            torch.nn.init.normal_(padded_role.module.value_head.weight)
            packed_role.module.load_state_dict(padded_role.module.state_dict())
        expected, result = (getattr(r, method)(batch) for r in (padded_role, packed_role))
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_tokens", [14, 21, 1000])
@pytest.mark.parametrize("role", [LocalPolicy, LocalCritic])
def test_packed_gradients_are_those_of_padded_rows(tmp_path: Path, role: type, max_tokens: int) -> None:
    config = tiny_training_config(str(tiny_model_dir(tmp_path)), lr=0.0)
    batch = random_batch(LENGTHS)
    expected = step_gradient(role(config, Replicated(), 1), batch)
    result = step_gradient(role(packed(config, max_tokens), Replicated(), 1), batch)
    assert (result - expected).norm() < 1e-5 * expected.norm()


def test_a_packed_sequence_does_not_see_its_neighbours(tmp_path: Path) -> None:
    policy = LocalPolicy(packed(tiny_training_config(str(tiny_model_dir(tmp_path)))), Replicated(), 1)
    batch = random_batch(LENGTHS).rollout
    other = replace(batch, input_ids=batch.input_ids.clone())
    other.input_ids[1, :14] = 5
    before, after = policy.log_probs(batch), policy.log_probs(other)
    rest = [0, 2, 3, 4]
    torch.testing.assert_close(after[rest], before[rest], atol=1e-6, rtol=0)
    assert not torch.equal(before[1], after[1])


def test_a_pack_holds_every_token_once_and_finds_it_again() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 0, 0], [9, 4, 0]])
    made = pack(ids, torch.tensor([3, 1, 2]))
    assert made.input_ids.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert made.starts.tolist() == [0, 3, 4, 6]
    assert made.longest == 3
    rows, columns = torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1])
    assert made.input_ids[0, made.index(rows, columns)].tolist() == [7, 8, 4]


def slow_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *_: object, **kwargs: object) -> Tensor:
    """What the kernel promises, one sequence at a time: (N, heads, d), causal inside each sequence."""
    assert kwargs["window_size"] == (-1, 0)
    parts = []
    for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        one = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        out = scaled_dot_product_attention(*one, is_causal=True, scale=kwargs["scale"], enable_gqa=kwargs["enable_gqa"])
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("packing_mode", ["packed", "padded"])
def test_torchs_ragged_kernel_is_called_with_its_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing_mode: str
) -> None:
    """The kernel itself needs CUDA; a slow stand-in checks layout, grouping of heads and cumulative lengths."""
    monkeypatch.setattr(packing, "varlen_attn", slow_varlen)
    config = tiny_training_config(str(tiny_model_dir(tmp_path)))
    batch = random_batch(LENGTHS).rollout
    expected = LocalPolicy(config, Replicated(), 1).log_probs(batch)
    ragged = with_policy(config, packing=packing_mode)
    ragged = replace(ragged, model=replace(ragged.model, attention="varlen"))
    result = LocalPolicy(ragged, Replicated(), 1).log_probs(batch)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_a_sliding_window_reaches_the_ragged_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(packing, "varlen_attn", lambda q, *_, **kwargs: seen.update(kwargs) or q)
    states = torch.zeros(1, 2, 6, 4)
    varlen_attention(torch.nn.Identity(), states, states, states, None, sliding_window=4)
    assert seen["window_size"] == (3, 0)


def test_attention_is_ragged_only_in_half_precision_on_a_gpu(tmp_path: Path) -> None:
    assert attention_implementation(ModelConfig(), "cpu") == "sdpa"
    assert attention_implementation(ModelConfig(dtype="bfloat16"), "cpu") == "sdpa"
    assert attention_implementation(ModelConfig(), "cuda") == "sdpa"
    assert attention_implementation(ModelConfig(dtype="bfloat16"), "cuda") in (VARLEN, "flash_attention_2")
    policy = LocalPolicy(tiny_training_config(str(tiny_model_dir(tmp_path))), Replicated(), 1)
    assert not policy.layout.packed


def test_a_pack_of_one_row_is_the_plain_model(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    policy = LocalPolicy(packed(tiny_training_config(str(path))), Replicated(), 1)
    batch = random_batch((7,)).rollout
    logits = AutoModelForCausalLM.from_pretrained(path)(batch.input_ids).logits[0, :-1] / 0.7
    expected = logits.log_softmax(-1).gather(1, batch.input_ids[0, 1:, None])[:, 0].where(batch.loss_mask[0, 1:], 0.0)
    torch.testing.assert_close(policy.log_probs(batch)[0, 1:], expected, atol=1e-5, rtol=1e-5)
