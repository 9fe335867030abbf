"""From conversations to token ids with a loss mask, cut exactly where a rollout would cut them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from search_r1.data.templates import PromptEncoder, encode_plain
from search_r1.errors import DataError

logger = logging.getLogger(__name__)
Message = Mapping[str, str]
Tokenizer = Any
"""A Hugging Face tokenizer with a chat template."""

_OBSERVATION = re.compile(r"(\n*<information>.*?</information>\n*)", re.DOTALL)
_STAND_INS = ("yes", "no")
_END_OF_ROLLOUT = "</answer>"


@dataclass(frozen=True, slots=True)
class SFTExample:
    """One conversation as tokens."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """Parallel to `token_ids`; True on what the assistant wrote itself."""


@dataclass(frozen=True, slots=True)
class SFTBatch:
    """Right-padded examples."""

    input_ids: Tensor
    """(B, T) int64."""
    loss_mask: Tensor
    """(B, T) bool, False on padding."""


class ConversationEncoder:
    """Encodes a conversation as a rollout of it would look.

    The prompt comes from the chat template. An assistant text is cut at its observations
    (`<information>…</information>` with the line breaks around), and every piece is encoded by itself, since in a
    rollout sampled and observed tokens meet at these borders and never merge. Spellings of control tokens inside a
    message stay text. The end-of-turn token is learned, save after a final `</answer>`, where a rollout stops.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode_prompt = PromptEncoder(tokenizer)

    def __call__(self, messages: Sequence[Message]) -> SFTExample:
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        ids = list(self._encode_prompt(messages[:first]))
        mask = [False] * len(ids)

        def append(piece: Sequence[int], learned: bool) -> None:
            ids.extend(piece)
            mask.extend([learned] * len(piece))

        for i, message in enumerate(messages[first:], start=first):
            if message["role"] != "assistant":
                continue
            for piece, learned in split_observations(message["content"]):
                append(encode_plain(self._tokenizer, piece), learned)
            following = messages[i + 1 :]
            if not following and message["content"].rstrip().endswith(_END_OF_ROLLOUT):
                continue
            between = list(takewhile(lambda m: m["role"] != "assistant", following))
            end, rest = self._after_turn(messages[:first], between)
            append(end, learned=True)
            if len(between) < len(following):
                append(rest, learned=False)
        return SFTExample(tuple(ids), tuple(mask))

    def _after_turn(self, prompt: Sequence[Message], between: Sequence[Message]) -> tuple[list[int], list[int]]:
        """What follows an assistant turn: the end-of-turn token, and the messages up to the next assistant turn.

        They are rendered behind stand-ins for the turn, so that templates that rewrite earlier turns change nothing;
        what two renderings have in common at their end follows the turn.
        """
        first, second = (
            self._encode_prompt([*prompt, {"role": "assistant", "content": stand_in}, *between])
            for stand_in in _STAND_INS
        )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
        suffix = list(first[len(first) - sum(1 for _ in same) :])
        if not getattr(self._tokenizer, "chat_template", None):
            return [self._tokenizer.eos_token_id], suffix
        control = set(self._tokenizer.all_special_ids)
        end = next((i + 1 for i, token in enumerate(suffix) if token in control), 0)
        return suffix[:end], suffix[end:]


def split_observations(text: str) -> list[tuple[str, bool]]:
    """Pieces of an assistant text, each with whether the assistant wrote it.

    >>> split_observations("a</search>\\n\\n<information>p</information>\\n\\nb")
    [('a</search>', True), ('\\n\\n<information>p</information>\\n\\n', False), ('b', True)]
    """
    pieces = _OBSERVATION.split(text)
    return [(piece, i % 2 == 0) for i, piece in enumerate(pieces) if piece]


def read_examples(files: Sequence[str], tokenizer: Tokenizer, max_length: int) -> list[SFTExample]:
    """All conversations of the files that fit into `max_length` tokens; how many did not is logged.

    Raises:
        DataError: a missing or empty file, a row without messages or without an assistant turn, nothing that fits.
    """
    examples: list[SFTExample] = []
    encode = ConversationEncoder(tokenizer)
    too_long = 0
    for file in files:
        for number, row in enumerate(read_rows(Path(file)), start=1):
            example = encode(_messages(row, f"{file}, row {number}"))
            if len(example.token_ids) <= max_length:
                examples.append(example)
            else:
                too_long += 1
    if too_long:
        logger.warning("%d examples are longer than data.max_length=%d tokens and are left out", too_long, max_length)
    if files and not examples:
        raise DataError(f"{', '.join(files)}: no example within data.max_length={max_length} tokens")
    return examples


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a parquet or JSON lines file.

    Raises:
        DataError: missing, empty, or a line that is not a JSON object.
    """
    if not file.is_file():
        raise DataError(f"{file} does not exist")
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    else:
        rows = []
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{file}, line {number}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise DataError(f"{file}, line {number}: not a JSON object")
                rows.append(row)
    if not rows:
        raise DataError(f"{file} has no rows")
    return rows


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    messages = row.get("messages")
    if not messages:
        raise DataError(f"{where}: no `messages`; data_prep makes them from other formats")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or not message.get("role"):
            raise DataError(f"{where}: a message needs `role` and `content`, found {str(message)[:80]}")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise DataError(f"{where}: no assistant turn to learn from")
    return list(messages)


def collate_examples(examples: Sequence[SFTExample], pad_token_id: int) -> SFTBatch:
    """Pad on the right; causal attention alone then keeps padding out."""
    length = max(len(example.token_ids) for example in examples)
    input_ids = torch.full((len(examples), length), pad_token_id, dtype=torch.long)
    loss_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for i, example in enumerate(examples):
        input_ids[i, : len(example.token_ids)] = torch.tensor(example.token_ids)
        loss_mask[i, : len(example.loss_mask)] = torch.tensor(example.loss_mask)
    loss_mask[:, 0] = False  # the first token has no context
    return SFTBatch(input_ids, loss_mask)
