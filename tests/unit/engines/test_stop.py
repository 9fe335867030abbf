"""Stop strings against a slow oracle: decode everything after every token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from search_r1.engines.stop import StopMatcher, decode, end_of_text_ids, new_token_limits
from search_r1.errors import EngineError
from tests.model_factory import tiny_tokenizer

STOPS = ("</search>", "</answer>")


def first_stop(matcher: StopMatcher, ids: list[int]) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if matcher(ids[:n])), None)


def first_stop_by_decoding(tokenizer, stop, ids) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if any(s in decode(tokenizer, ids[:n]) for s in stop)), None)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Spaces are "▁", unknown characters fall back to bytes, and decoding strips a leading space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "</", "search", ">", "▁</", ">a", "ch", "sear"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = {"bytes": tiny_tokenizer(), "sentencepiece": sentencepiece_like()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", [STOPS, ("京",), ("x京", " a"), ("a\n",), (">",)])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_stop_string_is_found_at_the_very_token_that_completes_it(name, stop, data):
    tokenizer = TOKENIZERS[name]
    matcher = StopMatcher(tokenizer, len(tokenizer), stop)
    token = st.sampled_from(sorted({*tokenizer.encode("x京</search>\n</answer> a\n>"), *range(len(tokenizer) - 8)}))
    ids = data.draw(st.lists(token, max_size=12))
    ids += data.draw(st.sampled_from([[], *(tokenizer.encode(text, add_special_tokens=False) for text in stop)]))
    ids += data.draw(st.lists(token, max_size=3))
    assert first_stop(matcher, ids) == first_stop_by_decoding(tokenizer, stop, ids)


def test_a_token_that_merges_the_closing_bracket_with_a_line_break_completes_the_tag():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("東 paris </search>\n<information>")
    matcher = StopMatcher(tokenizer, len(tokenizer), STOPS)
    end = first_stop(matcher, ids)
    assert decode(tokenizer, ids[:end]) == "東 paris </search>\n"


def test_without_stop_strings_nothing_stops():
    assert not StopMatcher(tiny_tokenizer(), 425, ())([5, 6])


def test_end_of_text_is_whatever_any_of_the_sources_names():
    sources = [SimpleNamespace(eos_token_id=[1, 2]), SimpleNamespace(eos_token_id=3), SimpleNamespace(), None]
    assert end_of_text_ids(*sources, SimpleNamespace(eos_token_id=None)) == {1, 2, 3}


def test_room_in_the_window_limits_new_tokens():
    assert new_token_limits([[1] * 5, [1] * 9], 4, 10) == [4, 1]
    assert new_token_limits([[1] * 99], 4, None) == [4]
    with pytest.raises(EngineError, match="max_new_tokens=0"):
        new_token_limits([[1]], 0, None)
