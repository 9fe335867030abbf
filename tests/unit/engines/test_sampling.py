"""Sampling against numbers worked by hand and against frequencies."""

from __future__ import annotations

import pytest
import torch

from search_r1.engines.sampling import sample, uniform_draws

LOGITS = torch.tensor([[0.5, 0.2, 0.3]]).log()


@pytest.mark.parametrize("uniform, token", [(0.0, 0), (0.49, 0), (0.51, 1), (0.69, 1), (0.71, 2), (0.9999999, 2)])
def test_a_draw_is_inverted_through_the_cumulative_distribution(uniform, token):
    tokens, log_probs = sample(LOGITS, 1.0, 1.0, torch.tensor([uniform]))
    assert tokens.tolist() == [token]
    torch.testing.assert_close(log_probs, LOGITS[0, token][None])


def test_log_probs_are_at_the_sampling_temperature_and_at_1_when_greedy():
    tokens, log_probs = sample(LOGITS, 0.5, 1.0, torch.tensor([0.1]))
    assert tokens.tolist() == [0]
    assert log_probs.exp().item() == pytest.approx(0.25 / 0.38)
    tokens, log_probs = sample(LOGITS, 0.0, 1.0, None)
    assert tokens.tolist() == [0]
    assert log_probs.exp().item() == pytest.approx(0.5)


def test_top_p_draws_within_the_nucleus_and_reports_the_full_distribution():
    uniforms = torch.linspace(0, 0.999, 400)
    tokens, log_probs = sample(LOGITS.expand(400, 3), 1.0, 0.75, uniforms)
    assert set(tokens.tolist()) == {0, 2}
    assert (tokens == 0).float().mean().item() == pytest.approx(0.5 / 0.8, abs=0.01)
    assert sorted({round(value, 4) for value in log_probs.exp().tolist()}) == [0.3, 0.5]
    assert set(sample(LOGITS.expand(400, 3), 1.0, 0.0, uniforms)[0].tolist()) == {0}


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1000, 50), -torch.inf)
    logits[:, 7], logits[:, 20] = 0.0, 1.0
    tokens, _ = sample(logits, 1.0, 1.0, torch.linspace(0, 1 - 2**-24, 1000))
    assert set(tokens.tolist()) == {7, 20}


def test_frequencies_follow_the_distribution():
    uniforms = uniform_draws(range(4000), 1)[:, 0]
    tokens, _ = sample(LOGITS.expand(4000, 3), 1.0, 1.0, uniforms)
    shares = torch.bincount(tokens, minlength=3) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.2, 0.3]), atol=0.03, rtol=0)


def test_a_rows_draws_depend_on_its_seed_alone_and_not_on_how_many_are_made():
    many, one = uniform_draws([3, 8, 5], 50), uniform_draws([8], 10)
    assert torch.equal(many[1, :10], one[0])
    assert not torch.equal(many[0], many[2])
