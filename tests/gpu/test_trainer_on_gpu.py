"""The trainer's side on a GPU, beside the same on a CPU in float32. Neither Ray nor vLLM is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from search_r1.algorithms.log_probs import chunked_log_probs
from search_r1.backends.critic import LocalCritic
from search_r1.backends.policy import LocalPolicy
from search_r1.backends.sharding import FSDP2, Replicated
from search_r1.config import Config, ShardingConfig
from search_r1.engines.hf_engine import HFEngine
from search_r1.trainer.parity import Parity, ProbedEngine
from search_r1.types import Prompt, SamplingConfig, Status, Trajectory
from tests.batches import random_batch, tiny_training_config, with_policy
from tests.fakes import make_question
from tests.model_factory import ARCHITECTURES, tiny_model_dir, tiny_tokenizer

pytestmark = pytest.mark.gpu
LENGTHS = (9, 14, 6, 11, 4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), num_hidden_layers=2))


def in_bfloat16(config: Config) -> Config:
    return replace(config, model=replace(config.model, dtype="bfloat16"))


def log_probs(config: Config, device: str) -> torch.Tensor:
    return LocalPolicy(config, Replicated(device), 1).log_probs(random_batch(LENGTHS).rollout)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_log_probs_are_those_of_a_cpu(device: str, tmp_path: Path, architecture: str) -> None:
    config = tiny_training_config(str(tiny_model_dir(tmp_path, architecture)))
    torch.testing.assert_close(log_probs(config, device), log_probs(config, "cpu"), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_bfloat16_log_probs_come_close(device: str, path: str, packing: str) -> None:
    """Packed on CUDA runs flash-attn where it is installed, else torch's varlen_attn."""
    config = tiny_training_config(path)
    found = log_probs(with_policy(in_bfloat16(config), packing=packing), device)
    assert 0 < (found - log_probs(config, "cpu")).abs().max() < 0.3


@pytest.mark.parametrize("role", [LocalPolicy, LocalCritic])
def test_a_packed_step_does_what_a_padded_one_does(device: str, path: str, role: Any) -> None:
    weights = []
    for packing in ("padded", "packed"):
        torch.manual_seed(0)
        trained = role(with_policy(in_bfloat16(tiny_training_config(path)), packing=packing), Replicated(device), 1)
        trained.update(random_batch(LENGTHS))
        weights.append(torch.cat([p.detach().float().cpu().flatten() for p in trained.module.parameters()]))
    assert (weights[0] - weights[1]).norm() < 1e-2 * weights[0].norm()


def test_chunked_log_probs_and_their_gradients_are_those_of_whole_logits(device: str) -> None:
    torch.manual_seed(0)
    states = torch.randn(50, 32, device=device, requires_grad=True)
    head = torch.randn(700, 32, device=device, requires_grad=True)
    tokens = torch.randint(700, (50,), device=device)
    found, entropy = chunked_log_probs(states, head, tokens, 0.8, with_entropy=True)
    (found.sum() + entropy.sum()).backward()
    gradients = states.grad, head.grad
    states.grad = head.grad = None
    plain = (states @ head.T / 0.8).float().log_softmax(-1)
    expected, plain_entropy = plain.gather(1, tokens[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    (expected.sum() + plain_entropy.sum()).backward()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(entropy, plain_entropy, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(gradients, (states.grad, head.grad), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype, max_error", [("float32", 1e-3), ("bfloat16", 0.1)])
def test_the_hf_engine_agrees_with_the_policy(device: str, path: str, dtype: str, max_error: float) -> None:
    config = tiny_training_config(path)
    policy = LocalPolicy(config, Replicated(device), 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    engine = HFEngine(model, tiny_tokenizer(), dtype=torch.bfloat16 if dtype == "bfloat16" else None)
    sampling = SamplingConfig(24, temperature=config.rollout.temperature)
    prompts = [tuple(range(5, 5 + length)) for length in (3, 30, 12)]
    trajectories = [
        Trajectory(
            Prompt(make_question(), group, prompt),
            list(completion.token_ids),
            [True] * len(completion.token_ids),
            list(completion.log_probs),
            status=Status.ANSWERED,
        )
        for group, (prompt, completion) in enumerate(
            zip(prompts, engine.generate(prompts, sampling, range(3)), strict=True)
        )
    ]
    policy.update(random_batch(LENGTHS))
    engine.load_weights(policy.weights())
    parity = Parity(
        ProbedEngine(lambda *args: [engine.score(*args)], engine.forget),
        policy.log_probs,
        policy.log_probs,
        lambda edit="": {},
        list,
        sampling,
        max_error,
    )
    assert parity(trajectories, 1)["parity/log_prob_gap"] <= max_error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_a_step_of_fsdp2_is_that_of_one_process(device: str, path: str, dtype: str, cpu_offload: bool) -> None:
    config = tiny_training_config(path)
    config = in_bfloat16(config) if dtype == "bfloat16" else config
    sharding = FSDP2(ShardingConfig("fsdp2", cpu_offload=cpu_offload), dtype, device)
    weights = []
    for kind in (Replicated(device), sharding):
        policy = LocalPolicy(config, kind, 1)
        policy.update(random_batch(LENGTHS))
        weights.append({name: tensor.float().cpu() for name, tensor in policy.weights()})
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).norm() <= 2e-2 * tensor.norm()


def test_a_policy_that_left_the_gpu_gives_its_memory_back_and_goes_on(gpu: str, path: str) -> None:
    steps = []
    for leaves in (False, True):
        policy = LocalPolicy(tiny_training_config(path), Replicated(gpu), 2)
        for _ in range(2):
            policy.update(random_batch(LENGTHS))
            if leaves:
                before = torch.cuda.memory_allocated()
                policy.offload()
                assert torch.cuda.memory_allocated() < before
        steps.append(torch.cat([tensor.cpu().flatten() for _, tensor in policy.weights()]))
    torch.testing.assert_close(*steps, atol=1e-5, rtol=1e-4)
