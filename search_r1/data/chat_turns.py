"""What a chat template puts between two assistant turns, so that a rollout grows by suffixes alone.

Templates are free to rewrite earlier turns when a later one is added: thoughts are dropped, a line break follows the
end-of-turn token. A rollout cannot follow: what was sampled stays. So the template is rendered once, over stand-ins,
and the text behind the stand-in for an assistant turn is taken apart; from then on observations are put into it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from search_r1.data.templates import Tokenizer, control_tokens, encode_between
from search_r1.errors import ConfigError

_TURN, _TEXT = "\ue0a1", "\ue0a2"
_USER = f"<tool_response>{_TEXT}</tool_response>"
"""Shaped as an observation: some templates treat a user message of this form in its own way."""


class ChatTurns:
    """Continues a conversation behind a sampled turn: its end where it lacks one, a user message, the next header."""

    def __init__(self, tokenizer: Tokenizer, opening: str = "") -> None:
        """`opening` follows every assistant header, e.g. `<think>`.

        Raises:
            ConfigError: there is no chat template, or it cannot be followed by suffixes; the message says why.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "environment.name=tools needs a chat model: the tokenizer of model.path has no chat template"
            )
        self._tokenizer = tokenizer
        first = _behind_turn(tokenizer, rounds=1)
        if _behind_turn(tokenizer, rounds=2) != first:
            raise _refusal("it renders what follows a turn differently in the first and in a later round")
        between, after = first
        control = sorted(control_tokens(tokenizer), key=len, reverse=True)
        found = re.search("|".join(map(re.escape, control)), between) if control else None
        if found is None or between[: found.start()].strip():
            raise _refusal(
                f"an assistant turn does not end with a special token of the tokenizer, but with {between!r}"
            )
        self.end_of_turn = found[0]
        self.turn_start = _first_of(control, between[found.end() :], other_than=self.end_of_turn)
        """Special token that opens a turn; empty where the template has none."""
        self.end_id = self._id(self.end_of_turn)
        self.start_id = self._id(self.turn_start) if self.turn_start else None
        self.header = after + opening
        """From the end of a user message to the first sampled token."""
        self._before = between[found.end() :]

    def follow_up(self, text: str, cut: bool) -> tuple[str, list[int]]:
        """A user message of `text` and the next assistant header, as text and as ids.

        Args:
            text: spellings of control tokens in it stay text.
            cut: the sampled turn did not end with the end-of-turn token, so this begins with it.
        """
        before = (self.end_of_turn if cut else "") + self._before
        return before + text + self.header, encode_between(self._tokenizer, before, text, self.header)

    def _id(self, token: str) -> int:
        ids = self._tokenizer.encode(token, add_special_tokens=False)
        assert len(ids) == 1, f"the special token {token!r} has the ids {ids}"
        return ids[0]


def _behind_turn(tokenizer: Tokenizer, rounds: int) -> tuple[str, str]:
    """What stands between an assistant turn and the text of the next user message, and what stands behind that."""
    from jinja2 import TemplateError

    turn = {"role": "assistant", "content": _TURN}
    earlier = [turn, {"role": "user", "content": _USER}] * (rounds - 1)
    messages = [{"role": "user", "content": "q"}, *earlier, turn, {"role": "user", "content": _USER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise _refusal(f"it does not take user and assistant messages in turn ({error})") from error
    if text.count(_TURN) != rounds or text.count(_USER) != rounds:
        raise _refusal("it drops, repeats or rewrites messages of a conversation")
    between, _, after = text.rpartition(_TURN)[2].partition(_USER)
    return between, after


def _first_of(tokens: Sequence[str], text: str, other_than: str) -> str:
    found = re.search("|".join(map(re.escape, tokens)), text)
    return found[0] if found and found[0] != other_than else ""


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"the chat template of model.path cannot be used turn by turn: {reason}; use a model with another template, "
        "or environment.name=search"
    )
