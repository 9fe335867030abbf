"""Muon's steps against their definition, and its division of labour with AdamW."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from search_r1.backends.muon import orthogonalize
from search_r1.backends.optim import build_optimizer
from search_r1.config import OptimConfig
from tests.model_factory import tiny_model


def test_orthogonalized_matrices_keep_their_singular_vectors_and_lose_their_singular_values() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 20), (3, 20, 8)):
        matrices = torch.randn(shape, generator=generator)
        result = orthogonalize(matrices)
        assert torch.allclose(result[1], orthogonalize(matrices[1:2])[0], atol=1e-5)
        u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
        inner = u.mT @ result @ vh.mT
        values = inner.diagonal(dim1=-2, dim2=-1)
        assert values.min() > 0.6
        assert values.max() < 1.3
        assert (inner - torch.diag_embed(values)).abs().max() < 1e-3


def test_the_first_step_of_a_matrix_has_the_size_of_an_adamw_step() -> None:
    layer = nn.Linear(64, 64, bias=False)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, OptimConfig(name="muon", lr=1e-2, weight_decay=0.0))
    layer.weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    root_mean_square = (layer.weight.detach() - before).square().mean().sqrt()
    assert 0.1 * 1e-2 < root_mean_square < 0.3 * 1e-2


def test_embeddings_norms_and_biases_step_exactly_as_under_adamw() -> None:
    models = [tiny_model() for _ in range(2)]
    for model, name in zip(models, ("adamw", "muon"), strict=True):
        optimizer = build_optimizer(model, OptimConfig(name=name, lr=1e-2))  # type: ignore[arg-type]
        for _ in range(2):
            for i, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (i % 3 - 1)) + parameter.detach()
            optimizer.step()
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(a, b) == (a.dim() == 1 or "embed" in name)


def test_muon_goes_on_from_a_saved_state_as_if_it_had_not_stopped() -> None:
    def gradients(layer: nn.Linear, step: int) -> None:
        layer.weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        layer.bias.grad = torch.ones(6)

    config = OptimConfig(name="muon", lr=1e-2)
    first = nn.Linear(4, 6)
    optimizer = build_optimizer(first, config)
    gradients(first, 0)
    optimizer.step()
    second = nn.Linear(4, 6)
    second.load_state_dict(first.state_dict())
    resumed = build_optimizer(second, config)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for layer, its in ((first, optimizer), (second, resumed)):
        gradients(layer, 1)
        its.step()
    assert torch.equal(first.weight, second.weight)
