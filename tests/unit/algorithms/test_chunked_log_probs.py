from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from search_r1.algorithms.log_probs import chunked_log_probs

N, V, D = 23, 40, 6


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    bias = torch.randn(V).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(V, (N,))


def oracle(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T).float() if bias is None else torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("chunk_elements", [1, 3 * V, 7 * V + 5, N * V, 2**24])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias, softcap", [(False, None), (True, None), (True, 2.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_entropy_and_gradients_equal_those_of_the_whole_logits(
    chunk_elements: int, temperature: float, with_bias: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = make_inputs(dtype)
    used_bias = bias if with_bias else None
    leaves = [hidden, weight, *([bias] if with_bias else [])]

    expected = oracle(hidden, weight, used_bias, targets, temperature, softcap)
    expected_grads = torch.autograd.grad(expected[0].sum() + 0.3 * expected[1].sum(), leaves)
    log_probs, entropy = chunked_log_probs(
        hidden, weight, targets, temperature, chunk_elements, used_bias, with_entropy=True, logit_softcap=softcap
    )
    assert entropy is not None
    grads = torch.autograd.grad(log_probs.sum() + 0.3 * entropy.sum(), leaves)

    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-4, atol=1e-4)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_temperature_is_part_of_the_log_probs() -> None:
    hidden, weight, _, targets = make_inputs()
    at_one, _ = chunked_log_probs(hidden, weight, targets, 1.0)
    at_half, _ = chunked_log_probs(hidden, weight, targets, 0.5)
    doubled, _ = chunked_log_probs(hidden * 2, weight, targets, 1.0)
    torch.testing.assert_close(at_half, doubled)
    assert not torch.allclose(at_half, at_one)


def test_chunks_change_no_log_prob_without_gradients_either() -> None:
    hidden, weight, _, targets = make_inputs()
    with torch.no_grad():
        whole, none = chunked_log_probs(hidden, weight, targets, 1.0)
        parts, _ = chunked_log_probs(hidden, weight, targets, 1.0, chunk_elements=2 * V)
    assert none is None
    torch.testing.assert_close(parts, whole)


def test_no_tokens_give_empty_results_and_a_gradient_of_zero() -> None:
    hidden, weight, _, targets = make_inputs()
    log_probs, entropy = chunked_log_probs(hidden[:0], weight, targets[:0], 1.0, with_entropy=True)
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert (weight.grad == 0).all()


def test_temperature_zero_is_refused() -> None:
    hidden, weight, _, targets = make_inputs()
    with pytest.raises(ValueError, match="temperature=0"):
        chunked_log_probs(hidden, weight, targets, 0)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_of_all_tokens_times_the_vocabulary_is_ever_made(with_entropy: bool) -> None:
    tokens, vocabulary, chunk = 512, 1000, 16 * 1000
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    with LargestTensor() as largest:
        log_probs, entropy = chunked_log_probs(
            hidden, weight, torch.randint(vocabulary, (tokens,)), 0.8, chunk, with_entropy=with_entropy
        )
        (log_probs.sum() + (entropy.sum() if entropy is not None else 0.0)).backward()
    assert largest.elements == chunk


def test_the_graph_keeps_nothing_of_the_size_of_a_chunk() -> None:
    """What is saved for the backward pass: hidden states and weights, not logits."""
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked_log_probs(hidden, weight, torch.zeros(512).long(), 1.0, 16 * 1000, with_entropy=True)
    assert max(saved, default=0) <= weight.numel()
