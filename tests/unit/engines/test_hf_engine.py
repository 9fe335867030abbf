"""What the HF engine promises beyond the contract: repeatability, reuse, batches, bad weights."""

from __future__ import annotations

import pytest
import torch

from search_r1.engines.hf_engine import HFEngine
from search_r1.errors import EngineError
from search_r1.types import SamplingConfig
from tests.model_factory import ARCHITECTURES, randomize, tiny_model, tiny_tokenizer

SAMPLING = SamplingConfig(max_new_tokens=12)


def contexts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 400, (length,), generator=generator).tolist() for length in lengths]


def log_probs_of(model, context, token_ids, temperature=1.0):
    """Oracle: one plain forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *token_ids]])).logits[0, len(context) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(token_ids)), list(token_ids)]


def assert_exact(model, contexts, completions, temperature=1.0):
    for context, completion in zip(contexts, completions, strict=True):
        expected = log_probs_of(model, context, completion.token_ids, temperature)
        assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=1e-4), completion


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_samples_with_exact_log_probs_over_three_turns(architecture, tied):
    model = tiny_model(architecture, tied=tied)
    engine = HFEngine(model, tiny_tokenizer())
    contexts = contexts_of(5, 33, 1, 80, 20)
    for turn in range(3):
        completions = engine.generate(contexts, SAMPLING, range(5))
        assert_exact(model, contexts, completions)
        observations = contexts_of(9, 2, 30, 4, 1, seed=turn)
        contexts = [
            [*context, *completion.token_ids, *observation]
            for context, completion, observation in zip(contexts, completions, observations, strict=True)
        ]


def test_a_later_turn_computes_only_what_was_appended():
    engine = HFEngine(tiny_model(), tiny_tokenizer())
    contexts = contexts_of(40, 50, 60)
    completions = engine.generate(contexts, SAMPLING, [1, 2, 3])
    before = engine.num_computed_tokens
    later = [[*c, *x.token_ids, 7, 8] for c, x in zip(contexts, completions, strict=True)][::-1]
    engine.generate(later[:2], SamplingConfig(1), [1, 2])
    assert engine.num_computed_tokens - before == 2 * 3  # the last sampled token and the two appended ones


def test_equal_contexts_are_computed_once_and_sampled_apart():
    model = tiny_model()
    engine = HFEngine(model, tiny_tokenizer())
    contexts = contexts_of(30) * 4
    completions = engine.generate(contexts, SamplingConfig(1), [1, 2, 3, 4])
    assert engine.num_computed_tokens == 30
    assert len({completion.token_ids for completion in completions}) > 1
    assert_exact(model, contexts, engine.generate(contexts, SAMPLING, [1, 2, 3, 4]))


def test_a_row_draws_the_same_whatever_stands_beside_it():
    contexts, seeds = contexts_of(*range(3, 43)), list(range(40))
    together = HFEngine(tiny_model(), tiny_tokenizer()).generate(contexts, SAMPLING, seeds)
    cut = HFEngine(tiny_model(), tiny_tokenizer(), max_batch_size=7).generate(contexts, SAMPLING, seeds)
    by_tokens = HFEngine(tiny_model(), tiny_tokenizer(), max_batch_tokens=150).generate(contexts, SAMPLING, seeds)
    engine = HFEngine(tiny_model(), tiny_tokenizer())
    for row in (0, 17, 39):
        assert engine.generate([contexts[row]], SAMPLING, [seeds[row]])[0].token_ids == together[row].token_ids
    expected = [completion.token_ids for completion in together]
    for other in (cut, by_tokens):
        assert [completion.token_ids for completion in other] == expected


def test_the_same_seeds_repeat_a_rollout_and_others_do_not():
    engine = HFEngine(tiny_model(), tiny_tokenizer())
    contexts = contexts_of(10, 20)
    first = engine.generate(contexts, SAMPLING, [5, 6])
    assert [c.token_ids for c in engine.generate(contexts, SAMPLING, [5, 6])] == [c.token_ids for c in first]
    assert [c.token_ids for c in engine.generate(contexts, SAMPLING, [7, 8])] != [c.token_ids for c in first]


def test_the_trainers_own_module_is_sampled_as_it_is_after_an_update():
    model = tiny_model().train()
    engine = HFEngine(model, tiny_tokenizer())
    contexts = contexts_of(25, 30)
    engine.generate(contexts, SAMPLING, [0, 1])
    randomize(model, seed=9)
    engine.forget()
    assert_exact(model, contexts, engine.generate(contexts, SAMPLING, [0, 1]))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_more_rows_and_longer_ones_than_last_time_fit():
    model = tiny_model()
    engine = HFEngine(model, tiny_tokenizer())
    for lengths in ((4, 5), (100, 3, 200, 7, 300), (9,), (2, 2, 2)):
        contexts = contexts_of(*lengths)
        assert_exact(model, contexts, engine.generate(contexts, SAMPLING, range(len(lengths))))


def test_completions_end_where_the_models_window_ends():
    engine = HFEngine(tiny_model(max_length=64), tiny_tokenizer())
    (long, short) = engine.generate(contexts_of(60, 5), SamplingConfig(12, temperature=0.5), [0, 3])
    assert len(long.token_ids) <= 4
    assert len(short.token_ids) <= 12
    assert all(c.finish_reason == "length" for c in (long, short) if 2 not in c.token_ids)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_another_model_are_refused_by_name(tied):
    model = tiny_model(tied=tied)
    engine = HFEngine(model, tiny_tokenizer())
    weights = dict(tiny_model(tied=tied, seed=3).named_parameters())
    engine.load_weights(weights.items())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    with pytest.raises(EngineError, match=r"model\.norm\.weight is missing"):
        engine.load_weights((n, w) for n, w in weights.items() if n != "model.norm.weight")
    with pytest.raises(EngineError, match="bogus is unknown"):
        engine.load_weights([*weights.items(), ("bogus", torch.zeros(1))])
    with pytest.raises(EngineError, match=r"model\.norm\.weight has shape \(3,\)"):
        engine.load_weights({**weights, "model.norm.weight": torch.zeros(3)}.items())


def test_tied_embeddings_may_be_named_by_either_name():
    model = tiny_model(tied=True)
    weights = dict(tiny_model(tied=True, seed=3).named_parameters())
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    HFEngine(model, tiny_tokenizer()).load_weights(weights.items())
    assert torch.equal(model.get_input_embeddings().weight, weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("architecture", "window"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("mistral", {"sliding_window": 8}),
        ("phi3", {"sliding_window": 8}),
        ("starcoder2", {"sliding_window": 8}),
    ],
)
def test_a_model_whose_layers_see_a_window_only_is_refused(architecture, window):
    model = tiny_model(architecture, **window)
    with pytest.raises(EngineError, match=r"engine\.name=vllm"):
        HFEngine(model, tiny_tokenizer())


@pytest.mark.parametrize("window", [None, 512])
def test_a_window_that_no_context_fills_is_full_attention(window):
    model = tiny_model("mistral", sliding_window=window)
    contexts = contexts_of(5, 33)
    assert_exact(model, contexts, HFEngine(model, tiny_tokenizer()).generate(contexts, SAMPLING, [0, 1]))
