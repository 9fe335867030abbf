"""One suite over both engines: what a rollout may rely on, whichever of them samples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from search_r1.engines.hf_engine import HFEngine
from search_r1.errors import EngineError
from search_r1.types import Completion, SamplingConfig
from tests.model_factory import randomize, scripted_model, tiny_model_dir, tiny_tokenizer

WINDOW = 256
GREEDY = SamplingConfig(max_new_tokens=24, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=1.0)
TOKENIZER = tiny_tokenizer()


class Subject:
    """An engine and the trainer's model whose weights it should have."""

    def __init__(self, name: str, engine: Any, model: PreTrainedModel) -> None:
        self.name, self.engine, self.model = name, engine, model

    def generate(self, contexts: list[list[int]], sampling: SamplingConfig) -> list[Completion]:
        return self.engine.generate(contexts, sampling, range(len(contexts)))

    def sync(self) -> None:
        self.engine.load_weights(self.model.named_parameters())

    def assert_exact(self, contexts: list[list[int]], completions: list[Completion], temperature: float = 1.0) -> None:
        assert len(contexts) == len(completions)
        for context, completion in zip(contexts, completions, strict=True):
            ids = completion.token_ids
            assert ids
            with torch.no_grad():
                logits = self.model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1)[range(len(ids)), list(ids)]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)
            assert completion.text == TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("hf", True), id="hf-tied"),
        pytest.param(("hf", False), id="hf-untied"),
        pytest.param(("vllm", True), id="vllm-tied", marks=pytest.mark.vllm),
        pytest.param(("vllm", False), id="vllm-untied", marks=pytest.mark.vllm),
    ],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    name, tied = request.param
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model_dir(path, "qwen2", tied=tied, max_length=WINDOW)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if name == "hf":
        engine: Any = HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), TOKENIZER)
    else:
        from search_r1.engines.vllm_engine import VLLMEngine

        engine = VLLMEngine(str(path), dtype="float32", max_batch_size=32, cpu_cache_gib=0.25, sleep_mode=True)
    yield Subject(name, engine, model)
    engine.close()


@pytest.fixture(autouse=True)
def _random_weights(subject: Subject) -> None:
    """Tests that load other weights leave them behind; each one starts from the same."""
    if getattr(subject, "dirty", True):
        randomize(subject.model, seed=0)
        subject.sync()
        subject.dirty = False


def load_script(subject: Subject, start: str, continuation: str) -> list[int]:
    """Give both sides a model that greedily writes `continuation` after `start`; the start's token ids."""
    if subject.model.config.tie_word_embeddings:
        pytest.skip("a scripted model needs an output head of its own")
    start_ids, ids = TOKENIZER.encode(start), TOKENIZER.encode(continuation)
    scripted_model(subject.model, [start_ids[-1], *ids])
    subject.sync()
    subject.dirty = True
    return start_ids


def contexts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 400, (length,), generator=generator).tolist() for length in lengths]


def test_ids_and_log_probs_are_the_trainers_in_the_order_of_the_contexts(subject):
    contexts = contexts_of(30, 3, 90, 1, 57, 12)
    subject.assert_exact(contexts, subject.generate(contexts, SAMPLED))


def test_log_probs_are_those_at_the_sampling_temperature(subject):
    contexts = contexts_of(10, 20)
    subject.assert_exact(contexts, subject.generate(contexts, replace(SAMPLED, temperature=0.7)), temperature=0.7)


def test_greedy_takes_the_likeliest_token_and_is_repeatable(subject):
    contexts = contexts_of(10, 40, 25)
    first, second = subject.generate(contexts, GREEDY), subject.generate(contexts, GREEDY)
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    subject.assert_exact(contexts, first)
    with torch.no_grad():
        assert first[0].token_ids[0] == subject.model(torch.tensor([contexts[0]])).logits[0, -1].argmax()


def test_the_same_seeds_repeat_a_sample(subject):
    if subject.name == "vllm" and not torch.cuda.is_available():
        pytest.skip("vLLM cannot seed a request on a CPU")
    contexts = contexts_of(10, 40)
    assert subject.generate(contexts, SAMPLED) == subject.generate(contexts, SAMPLED)


def test_a_turn_ends_with_the_token_that_completes_a_stop_string(subject):
    (context,) = contexts_of(20)
    (whole,) = subject.generate([context], GREEDY)
    stop = whole.text[8:12]
    (cut,) = subject.generate([context], replace(GREEDY, stop=("never written", stop)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop in cut.text
    assert stop not in TOKENIZER.decode(cut.token_ids[:-1])
    subject.assert_exact([context], [cut])


def test_a_token_that_holds_the_end_of_a_stop_string_and_more_is_kept_whole(subject):
    start = load_script(subject, "a", "think</search>\nx")
    (completion,) = subject.generate([start], replace(GREEDY, stop=("</search>",)))
    assert completion.text == "think</search>\n"
    assert completion.finish_reason == "stop"
    subject.assert_exact([start], [completion])


def test_stop_strings_are_found_behind_and_inside_characters_of_several_tokens(subject):
    start = load_script(subject, "a", "東京</answer>")
    (tag,) = subject.generate([start], replace(GREEDY, stop=("</answer>",)))
    assert tag.text == "東京</answer>"
    (character,) = subject.generate([start], replace(GREEDY, stop=("京",)))
    assert character.text == "東京"
    (half,) = subject.generate([start], replace(GREEDY, max_new_tokens=2, stop=("京",)))
    assert half.finish_reason == "length"
    assert half.token_ids == character.token_ids[:2]


def test_end_of_text_is_kept_with_its_log_prob(subject):
    start = load_script(subject, "a", "search<|im_end|>x")
    (completion,) = subject.generate([start], GREEDY)
    assert completion.token_ids[-1] == TOKENIZER.eos_token_id
    assert completion.text == "search<|im_end|>"
    assert completion.finish_reason == "stop"
    subject.assert_exact([start], [completion])


def test_the_token_limit_ends_a_turn_with_the_reason_length(subject):
    start = load_script(subject, "a", "search the of is from lies in </")
    (completion,) = subject.generate([start], replace(GREEDY, max_new_tokens=3, stop=("</search>",)))
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 3


def test_no_contexts_give_no_completions(subject):
    assert subject.generate([], SAMPLED) == []


def test_an_empty_context_is_refused_by_its_row(subject):
    with pytest.raises(EngineError, match="context 1 is empty"):
        subject.generate([[5, 6], []], SAMPLED)


def test_a_context_without_room_in_the_models_window_is_refused_by_its_row(subject):
    with pytest.raises(EngineError, match=f"context 2 has {WINDOW} tokens"):
        subject.generate(contexts_of(3, 4, WINDOW), SAMPLED)


def test_a_completion_ends_where_the_models_window_ends(subject):
    contexts = contexts_of(WINDOW - 2)
    (completion,) = subject.generate(contexts, GREEDY)
    assert len(completion.token_ids) <= 2
    subject.assert_exact(contexts, [completion])


def test_new_weights_are_used_at_once_also_behind_a_cached_prefix(subject):
    contexts = contexts_of(200, 140, 33)  # longer than the 128 tokens of one block of the CPU cache
    old = subject.generate(contexts, GREEDY)
    for seed in (11, 12):
        randomize(subject.model, seed)
        subject.sync()
        subject.dirty = True
        new = subject.generate(contexts, GREEDY)
        assert [c.token_ids for c in new] != [c.token_ids for c in old]
        subject.assert_exact(contexts, new)


def test_later_turns_are_exact(subject):
    contexts = contexts_of(40, 12, 80)
    for _ in range(3):
        completions = subject.generate(contexts, replace(SAMPLED, max_new_tokens=8))
        subject.assert_exact(contexts, completions)
        contexts = [[*c, *x.token_ids, *contexts_of(9)[0]] for c, x in zip(contexts, completions, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_score_is_the_log_prob_that_sampling_would_have_reported(subject, temperature):
    contexts, sampling = contexts_of(30, 3, 200), replace(SAMPLED, temperature=temperature, max_new_tokens=1)
    sampled = [completion.token_ids[0] for completion in subject.generate(contexts, sampling)]
    candidates = [[token, 7, 300] for token in sampled]
    for _ in range(2):  # the second time behind a cached prefix
        scores = subject.engine.score(contexts, candidates, sampling)
        for context, tokens, found in zip(contexts, candidates, scores, strict=True):
            with torch.no_grad():
                logits = subject.model(torch.tensor([context])).logits[0, -1]
            expected = (logits / temperature).log_softmax(-1)[tokens]
            torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights_first", [False, True])
def test_an_engine_samples_the_same_after_it_slept(subject, weights_first):
    contexts = contexts_of(200, 33)
    before = subject.generate(contexts, GREEDY)
    subject.engine.sleep()
    if weights_first:
        subject.engine.wake_up(weights_only=True)
    subject.engine.wake_up()
    after = subject.generate(contexts, GREEDY)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    subject.assert_exact(contexts, after)


def test_a_sleeping_engine_neither_samples_nor_takes_weights(subject):
    subject.engine.sleep()
    with pytest.raises(EngineError, match="asleep: wake it up before it samples"):
        subject.generate([[5]], GREEDY)
    with pytest.raises(EngineError, match="asleep: wake it up before it takes weights"):
        subject.sync()
    subject.engine.wake_up(weights_only=True)
    with pytest.raises(EngineError, match="asleep: wake it up before it samples"):
        subject.engine.score([[5]], [[6]], GREEDY)
    subject.sync()
    subject.engine.wake_up()
    subject.assert_exact([[5]], subject.generate([[5]], GREEDY))


def test_after_a_deep_sleep_nothing_is_sampled_before_the_weights_have_come_again(subject):
    contexts = contexts_of(200, 33)
    subject.generate(contexts, GREEDY)
    subject.engine.sleep(level=2)
    randomize(subject.model, seed=31)
    subject.dirty = True
    subject.engine.wake_up()
    with pytest.raises(EngineError, match="send them before it samples"):
        subject.generate(contexts, GREEDY)
    subject.sync()
    subject.assert_exact(contexts, subject.generate(contexts, GREEDY))


@pytest.fixture
def vllm(subject: Subject) -> Subject:
    if subject.name != "vllm":
        pytest.skip("of the vLLM engine alone")
    return subject


def test_concurrent_requests_go_on_after_a_weight_update_in_their_middle(vllm):
    contexts = contexts_of(*range(5, 35))
    long = replace(SAMPLED, max_new_tokens=150)

    async def rollout() -> list[Completion]:
        tasks = [asyncio.create_task(vllm.engine.agenerate(context, long, 0)) for context in contexts]
        await asyncio.sleep(0.1)
        randomize(vllm.model, seed=21)
        await asyncio.to_thread(vllm.sync)
        return await asyncio.gather(*tasks)

    vllm.dirty = True
    completions = asyncio.run(rollout())
    assert all(len(c.token_ids) == 150 or c.finish_reason == "stop" for c in completions)
    vllm.assert_exact(contexts[:5], vllm.generate(contexts[:5], GREEDY))


def test_a_cancelled_request_leaves_the_engine(vllm):
    async def cancel() -> bool:
        """Whether it was still sampling, which a chance end-of-text may have ended."""
        task = asyncio.create_task(vllm.engine.agenerate([5, 6], replace(SAMPLED, max_new_tokens=200), 0))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert any(asyncio.run(cancel()) for _ in range(10))
    assert len(vllm.generate([[5, 6]], GREEDY)) == 1


def test_an_unknown_finish_reason_counts_as_length(vllm, caplog):
    from search_r1.engines.vllm_engine import finish_reason

    assert [finish_reason(reason) for reason in ("stop", "length", "repetition", None)] == ["stop", *["length"] * 3]
    assert "repetition" in caplog.text


def test_an_engine_with_half_loaded_weights_refuses_to_sample(vllm):
    weights = [(name, weight) for name, weight in vllm.model.named_parameters() if name != "model.norm.weight"]
    with pytest.raises(EngineError, match=r"model\.norm\.weight is missing"):
        vllm.engine.load_weights(weights)
    with pytest.raises(EngineError, match="weights are undefined"):
        vllm.generate([[5]], GREEDY)
