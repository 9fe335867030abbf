"""Text and messages to token ids, with control tokens reserved for the chat template.

Questions, passages and tool results come from outside. If `<|im_end|>` stands in one of them, it must stay text. So
each control token written in such text is cut after its first character and the pieces are encoded one by one: no
switch is flipped on a tokenizer that other threads use, and text without control tokens is encoded as ever. Non-special
added tokens that read as words, such as `<think>`, belong to the vocabulary and stay whole.

Only the first prompt goes through a chat template. Whatever follows is appended to it as ids: sampled ones as they are,
observations through `encode_plain`, or in chat turns through `chat_turns.ChatTurns`. Templates that rewrite earlier
turns never see a second message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from search_r1.errors import ConfigError

_CONTROL_FORM = re.compile(r"<\|.+\|>", re.DOTALL)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here.

    Where they exist, `added_tokens_decoder` (id to added token) and `chat_template` are read too.
    """

    bos_token_id: int | None
    all_special_tokens: list[str]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any: ...


def control_tokens(tokenizer: Tokenizer) -> set[str]:
    """Texts that the tokenizer would read as control: special tokens, and added ones of the form `<|…|>`."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_tokens) | {
        str(token.content) for token in added.values() if token.special or _CONTROL_FORM.fullmatch(token.content)
    }


def encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` with every control token in it taken as ordinary characters; nothing is added around it."""
    return encode_between(tokenizer, "", text, "")


def encode_between(tokenizer: Tokenizer, before: str, text: str, after: str) -> list[int]:
    """The same with trusted text of a template around it, whose control tokens are control."""
    mark = _unused_character(before + text + after)
    return _encode_pieces(tokenizer, before + _cut_control(tokenizer, text, mark) + after, mark)


class PromptEncoder:
    """Renders a first prompt to ids: by the chat template with its generation prompt, where the tokenizer has one.

    A base model without a template gets the contents one after the other, behind the begin-of-text token if its
    tokenizer puts one there.
    """

    def __init__(self, tokenizer: Tokenizer, opening: str = "", **template_options: Any) -> None:
        """`opening` follows the assistant header, as in every turn of a rollout; `template_options` go to the chat
        template, e.g. `tools` or `enable_thinking`."""
        self._tokenizer = tokenizer
        self._opening = opening
        self._options = template_options
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        if template_options and not self._has_template:
            raise ConfigError(
                f"the tokenizer has no chat template, so {', '.join(sorted(template_options))} would have no effect"
            )

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the prompt.

        Raises:
            ConfigError: the chat template refuses the messages.
        """
        if not self._has_template:
            text = "".join(message["content"] for message in messages)
            return (*_begin_of_text(self._tokenizer), *encode_plain(self._tokenizer, text))
        mark = _unused_character("".join(message["content"] for message in messages))
        safe = [{**message, "content": _cut_control(self._tokenizer, message["content"], mark)} for message in messages]
        return tuple(_encode_pieces(self._tokenizer, self._render(safe) + self._opening, mark))

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._options
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        return str(text)


def _cut_control(tokenizer: Tokenizer, text: str, mark: str) -> str:
    """`text` with `mark` after the first character of each control token."""
    tokens = sorted((token for token in control_tokens(tokenizer) if len(token) > 1), key=len, reverse=True)
    if not tokens:
        return text
    return re.sub(rf"(?=(?:{'|'.join(map(re.escape, tokens))}))(.)", rf"\g<1>{mark}", text, flags=re.DOTALL)


def _encode_pieces(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    return [token for piece in text.split(mark) if piece for token in tokenizer.encode(piece, add_special_tokens=False)]


def _unused_character(text: str) -> str:
    """A private-use character that does not occur in `text`."""
    return next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in text)


def _begin_of_text(tokenizer: Tokenizer) -> list[int]:
    added = tokenizer.encode("", add_special_tokens=True)
    return added[:1] if added and added[0] == tokenizer.bos_token_id else []
