"""From conversations to token ids with a loss mask, cut exactly where a rollout would cut them."""

from __future__ import annotations

import json
import logging
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor

from search_r1.data.conversations import Message, Row, read_rows
from search_r1.data.dataset_info import Dataset, load_datasets, plain_dataset
from search_r1.data.micro_batches import SequenceCost, balance
from search_r1.data.templates import PromptEncoder, control_tokens, encode_plain
from search_r1.data.tool_prompts import ToolPrompts
from search_r1.errors import ConfigError, DataError
from search_r1.rollout.tool_calls import parse_tool_turn
from search_r1.sft_config import SFTDataConfig

logger = logging.getLogger(__name__)
Tokenizer = Any
"""A Hugging Face tokenizer with a chat template."""

_OBSERVATION = re.compile(r"(\n*<(information|tool_response)>.*?</\2>\n*)", re.DOTALL)
_BORDER = re.compile(r"</?(?:information|tool_response)>")
_STAND_INS = ("yes", "no")
_END_OF_ROLLOUT = "</answer>"
_SHOWN = 3
"""Reasons told of why rows are bad, each with its first row."""


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
    lengths: Tensor
    """(B,) int64, tokens of each row."""


@dataclass(frozen=True, slots=True)
class SFTShare:
    """One worker's part of a batch, with the count of the whole batch over all workers."""

    examples: tuple[SFTExample, ...]
    num_tokens: int
    """Learned tokens of the whole batch."""


class ConversationEncoder:
    """Encodes a conversation as a rollout of it would look.

    The prompt comes from the chat template. An assistant text is cut at its observations
    (`<information>…</information>` or `<tool_response>…</tool_response>`, with the line breaks around), and every piece
    is encoded by itself, since in a rollout sampled and observed tokens meet at these borders and never merge.
    Spellings of control tokens inside a message stay text. The end-of-turn token is learned, save after a final
    `</answer>`, where a rollout stops unless it has tools.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode_prompt = PromptEncoder(tokenizer)
        self._with_tools: dict[str, ToolPrompts] = {}
        self._behind_last_turn: tuple[list[int], list[int]] | None = None

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> SFTExample:
        """`tools` are function schemas, which the prompt shows as a rollout's does.

        Raises:
            ConfigError: the chat template cannot render the prompt, an observation has only one of its tags, or a call
                cannot be read.
        """
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        ids = list(self._prompt(messages[:first], tools))
        has_calls = bool(tools) or any("<tool_call>" in message["content"] for message in messages)
        mask = [False] * len(ids)

        def append(piece: Sequence[int], learned: bool) -> None:
            ids.extend(piece)
            mask.extend([learned] * len(piece))

        for i, message in enumerate(messages[first:], start=first):
            if message["role"] != "assistant":
                continue
            for piece, learned in split_observations(message["content"]):
                if learned:
                    _check_calls(piece)
                append(encode_plain(self._tokenizer, piece), learned)
            following = messages[i + 1 :]
            if not following and not has_calls and message["content"].rstrip().endswith(_END_OF_ROLLOUT):
                continue
            between = list(takewhile(lambda m: m["role"] != "assistant", following))
            end, rest = self._after_turn(between)
            append(end, learned=True)
            if len(between) < len(following):
                append(rest, learned=False)
        return SFTExample(tuple(ids), tuple(mask))

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if not tools:
            return self._encode_prompt(messages)
        schemas = {str(tool["function"]["name"]): tool for tool in tools}
        key = json.dumps(schemas, sort_keys=True, default=str)
        if key not in self._with_tools:
            self._with_tools[key] = ToolPrompts(self._tokenizer, schemas)
        return self._with_tools[key].encode(messages, list(schemas))

    def _after_turn(self, between: Sequence[Message]) -> tuple[list[int], list[int]]:
        """What follows an assistant turn: the end-of-turn token, and the messages up to the next assistant turn.

        They are rendered behind stand-ins for the question and the turn, so that templates that rewrite earlier turns
        change nothing; what two renderings have in common at their end follows the turn.
        """
        if between:
            return self._rendered_behind_turn(between)
        if self._behind_last_turn is None:
            self._behind_last_turn = self._rendered_behind_turn(between)
        return self._behind_last_turn

    def _rendered_behind_turn(self, between: Sequence[Message]) -> tuple[list[int], list[int]]:
        question = {"role": "user", "content": "q"}
        first, second = (
            self._encode_prompt([question, {"role": "assistant", "content": stand_in}, *between])
            for stand_in in _STAND_INS
        )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
        suffix = list(first[len(first) - sum(1 for _ in same) :])
        if not getattr(self._tokenizer, "chat_template", None):
            return [self._tokenizer.eos_token_id], suffix
        control = {self._tokenizer.convert_tokens_to_ids(token) for token in control_tokens(self._tokenizer)}
        end = next((i + 1 for i, token in enumerate(suffix) if token in control), 0)
        if not end:
            raise ConfigError(
                "the chat template ends an assistant turn without a special token of the tokenizer, so that no end "
                "could be learned: take the template that the model was made with (data.chat_template)"
            )
        return suffix[:end], suffix[end:]


def split_observations(text: str) -> list[tuple[str, bool]]:
    """Pieces of an assistant text, each with whether the assistant wrote it.

    >>> split_observations("a</search>\\n\\n<information>p</information>\\n\\nb")
    [('a</search>', True), ('\\n\\n<information>p</information>\\n\\n', False), ('b', True)]

    Raises:
        DataError: tags do not stand in pairs, so that nobody knows what the assistant wrote.
    """
    pieces, start = list[tuple[str, bool]](), 0
    for found in _OBSERVATION.finditer(text):
        pieces += [(text[start : found.start()], True), (found[0], False)]
        start = found.end()
    pieces.append((text[start:], True))
    for piece, learned in pieces:
        if len(borders := _BORDER.findall(piece)) != (0 if learned else 2):
            raise DataError(
                f"the tags of observations do not stand in pairs: {', '.join(borders)} in {piece.strip()[:80]!r}. "
                "Complete or escape them"
            )
    return [(piece, learned) for piece, learned in pieces if piece]


def _check_calls(text: str) -> None:
    """Raise a DataError if a rollout could not read a call in this text: the model must not learn to write it."""
    for call in parse_tool_turn(text)[0]:
        if call.error:
            raise DataError(f"{call.error}: {call.text[:80]!r}")


def read_examples(data: SFTDataConfig, names: Sequence[str], tokenizer: Tokenizer) -> list[SFTExample]:
    """All conversations of the files, or datasets, that fit into `data.max_length` tokens.

    Rows that are too long, and up to `data.max_bad_share` of unusable rows, are left out, counted and logged.

    Raises:
        DataError: a missing or empty file, too many bad rows (with the first ones), nothing that fits.
    """
    encode, examples, bad = ConversationEncoder(tokenizer), list[SFTExample](), defaultdict[str, list[str]](list)
    total = 0
    for where, row, dataset in _rows(data, names):
        total += 1
        try:
            if isinstance(row, DataError):
                raise row
            found = dataset.convert(row)
            examples.append(encode(found.messages, found.tools))
        except ConfigError as error:
            bad[str(error)].append(where)
    _check_bad(bad, total, data.max_bad_share)
    fitting = [example for example in examples if len(example.token_ids) <= data.max_length]
    if len(fitting) < len(examples):
        count = len(examples) - len(fitting)
        logger.warning("%d examples are longer than data.max_length=%d tokens and are left out", count, data.max_length)
    if names and not fitting:
        raise DataError(f"{', '.join(names)}: no example within data.max_length={data.max_length} tokens")
    return fitting


def _rows(data: SFTDataConfig, names: Sequence[str]) -> Iterator[tuple[str, Row | DataError, Dataset]]:
    datasets = load_datasets(data.dataset_info, names) if data.dataset_info else map(plain_dataset, names)
    for dataset in datasets:
        columns = set[str]()
        for where, row in islice((placed for file in dataset.files for placed in read_rows(file)), data.max_rows):
            columns.update(row if isinstance(row, Mapping) else ())
            yield where, row, dataset
        dataset.check_columns(columns)


def _check_bad(bad: Mapping[str, Sequence[str]], total: int, max_share: float) -> None:
    """`bad` holds the places of the rows by what is wrong with them."""
    told = [f"{places[0]}: {reason}{_and_more(len(places) - 1)}" for reason, places in islice(bad.items(), _SHOWN)]
    others = sum(len(places) for places in islice(bad.values(), _SHOWN, None))
    shown, count = "; ".join(told) + _and_more(others), sum(map(len, bad.values()))
    if count > max_share * total:
        raise DataError(
            f"{count} of {total} rows cannot be used, more than data.max_bad_share={max_share}: {shown}. Repair "
            "them, or raise data.max_bad_share to leave them out"
        )
    if count:
        logger.warning("%d of %d rows cannot be used and are left out: %s", count, total, shown)


def _and_more(count: int) -> str:
    return f", and {count} more" if count else ""


def split_validation(
    examples: Sequence[SFTExample], val_size: float, seed: int
) -> tuple[list[SFTExample], list[SFTExample]]:
    """Training and validation examples: `val_size` of them by chance, a share where it is below 1, else a number.

    Raises:
        DataError: nothing would be left to train on.
    """
    count = round(val_size * len(examples)) if val_size < 1 else int(val_size)
    if not count:
        return list(examples), []
    if count >= len(examples):
        raise DataError(f"data.val_size={val_size} leaves none of {len(examples)} examples to train on: lower it")
    held_out = set(random.Random(f"{seed}/validation").sample(range(len(examples)), count))
    return (
        [example for i, example in enumerate(examples) if i not in held_out],
        [example for i, example in enumerate(examples) if i in held_out],
    )


def collate_examples(examples: Sequence[SFTExample], pad_token_id: int) -> SFTBatch:
    """Pad on the right; causal attention alone then keeps padding out."""
    length = max(len(example.token_ids) for example in examples)
    input_ids = torch.full((len(examples), length), pad_token_id, dtype=torch.long)
    loss_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for i, example in enumerate(examples):
        input_ids[i, : len(example.token_ids)] = torch.tensor(example.token_ids)
        loss_mask[i, : len(example.loss_mask)] = torch.tensor(example.loss_mask)
    loss_mask[:, 0] = False  # the first token has no context
    return SFTBatch(input_ids, loss_mask, torch.tensor([len(example.token_ids) for example in examples]))


def share_examples(
    examples: Sequence[SFTExample], num_workers: int, cost: SequenceCost | None = None
) -> list[SFTShare]:
    """A batch dealt to the workers by cost, or by length where none is given."""
    num_tokens = sum(sum(example.loss_mask) for example in examples)
    costs = [(cost or SequenceCost())(len(example.token_ids)) for example in examples]
    parts = balance(costs, num_workers)
    return [SFTShare(tuple(examples[row] for row in rows), num_tokens) for rows in parts]
