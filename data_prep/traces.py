"""Rollouts to demonstrations for supervised fine-tuning: only those well formed and exactly right."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.cli import console, count_table, existing_file, exit_code, parser, positive
from data_prep.rows import SFT_SCHEMA, write_parquet
from data_prep.tool_traces import Schemas, calls_tools, told_schemas, tool_fault, tool_messages, tool_settings
from search_r1.errors import DataError
from search_r1.prompts import TEMPLATES, check_template, prompt_messages
from search_r1.rewards.exact_match import em

EXAMPLES = """\
  python -m data_prep.traces --input traces.jsonl --output sft.parquet --max-passage-words 40
  python -m data_prep.traces --input runs/mine/latest/trajectories/*.jsonl --output sft.parquet --max-per-question 2
  python -m data_prep.traces --input copied.jsonl --output sft.parquet --tools examples.tools.functions \\
      --search-top-k 2 --forced-opening '<think>'"""

DROPPED = ("not well formed", "failed call", "no search", "wrong answer", "repeated response", "enough of its question")

_TAG = re.compile(r"<information>.*?</information>|</?(?:think|search|information|answer)>", re.DOTALL)
_TAG_LETTERS = {
    "<think>": "t", "</think>": "T", "<search>": "s", "</search>": "S", "<answer>": "a", "</answer>": "A",
    "<information>": "x", "</information>": "x",
}  # fmt: skip
_WELL_FORMED = re.compile(r"(?:tT|sSi)*aA")
_END_OF_TEXT = re.compile(r"(?:(?:<[|｜][^|｜<>]*[|｜]>|</s>|<eos>|<end_of_turn>)\s*)+$")
_INFORMATION = re.compile(r"(<information>)(.*?)(</information>)", re.DOTALL)
_PASSAGE = re.compile(r"^(?=Doc \d+\(Title: )", re.MULTILINE)


@dataclass(slots=True)
class Selection:
    """Demonstrations as rows of the SFT schema, and what became of every rollout read."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def select(
    rollouts: Iterable[Mapping[str, Any]],
    *,
    template: str = "search_r1",
    max_passage_words: int | None = None,
    max_per_question: int | None = None,
    tools: Schemas | None = None,
    forced_opening: str = "",
) -> Selection:
    """Rejection sampling. The whole response, observations included, becomes one assistant message; calls and results
    of the tool environment become turns of their own.

    Args:
        max_passage_words: keep so many words of each passage inside an information block.
        max_per_question: keep the first so many demonstrations of a question.
        tools: the schemas that tool rollouts were told.
        forced_opening: what stood before each of their turns.

    Raises:
        DataError: a tool rollout that was told of something else than `tools`, or did not have that opening.
    """
    result, seen, per_question = Selection(), set(), Counter[str]()
    words = max_passage_words
    shorten = None if words is None else lambda passages: _shorten(passages, words)
    for rollout in rollouts:
        response, reason = _judged(rollout)
        key = (rollout["question"], response)
        if not reason and key in seen:
            reason = "repeated response"
        if not reason and max_per_question is not None and per_question[rollout["question"]] >= max_per_question:
            reason = "enough of its question"
        result.counts["read"] += 1
        result.counts[reason or "kept"] += 1
        if reason:
            continue
        seen.add(key)
        per_question[rollout["question"]] += 1
        row = {"data_source": str(rollout.get("data_source") or "unknown"), "question": rollout["question"]}
        if calls_tools(rollout):
            row["tools"] = told_schemas(rollout, tools or {})
            row["messages"] = tool_messages(rollout, forced_opening, shorten)
        else:
            if max_passage_words is not None:
                response = shorten_passages(response, max_passage_words)
            prompt = prompt_messages(template, rollout["question"])
            row["messages"] = [*prompt, {"role": "assistant", "content": response}]
        result.rows.append(row)
    return result


def _judged(rollout: Mapping[str, Any]) -> tuple[str, str]:
    """What tells a rollout from others, and why it is no demonstration."""
    if calls_tools(rollout):
        return json.dumps(tool_messages(rollout)), tool_fault(rollout)
    response = response_of(rollout)
    return response, fault(response, rollout["golden_answers"])


def response_of(rollout: Mapping[str, Any]) -> str:
    """The text after the prompt: `response`, or completions and observations of `turns` one after the other.

    End-of-text tokens that were sampled are left out: the chat template writes its own. A turn that was answered by
    something else than passages makes the response unusable, since only information blocks are masked: it is empty.
    """
    if isinstance(rollout.get("response"), str):
        return _END_OF_TEXT.sub("", rollout["response"]).strip()
    parts = []
    for turn in rollout["turns"]:
        observation = turn.get("observation") or ""
        if observation and not _INFORMATION.fullmatch(observation.strip()):
            return ""
        parts += [_END_OF_TEXT.sub("", turn["completion"]), observation]
    return "".join(parts).strip()


def fault(response: str, golden_answers: Iterable[str]) -> str:
    """Why a response is no demonstration, one of `DROPPED`; empty when it is one.

    Well formed: closed think and search blocks, none inside another, every search followed by its information, a
    query in each, then one answer that ends the text. Tags inside an information block are passages' text.
    """
    found = list(_TAG.finditer(response))
    letters = "".join(_TAG_LETTERS.get(tag.group(), "i") for tag in found)
    if not _WELL_FORMED.fullmatch(letters) or found[-1].end() != len(response):
        return "not well formed"
    starts = [i for i, letter in enumerate(letters) if letter in "sa"]
    contents = [response[found[i].end() : found[i + 1].start()].strip() for i in starts]
    if not all(contents):
        return "not well formed"
    if "s" not in letters:
        return "no search"
    return "" if em(contents[-1], list(golden_answers)) else "wrong answer"


def shorten_passages(response: str, max_words: int) -> str:
    """Cut the text of each passage inside information blocks after `max_words` words; headers and tags stay."""

    def shorten(block: re.Match[str]) -> str:
        return block[1] + _shorten(block[2], max_words) + block[3]

    return _INFORMATION.sub(shorten, response)


def _shorten(passages: str, max_words: int) -> str:
    return "".join(_first_words(passage, max_words) for passage in _PASSAGE.split(passages))


def _first_words(passage: str, max_words: int) -> str:
    header = _header_length(passage)
    words = list(re.finditer(r"\S+", passage[header:]))
    if len(words) <= max_words:
        return passage
    end = header + (words[max_words - 1].end() if max_words else 0)
    return passage[:end] + ("\n" if passage.endswith("\n") else "")


def _header_length(passage: str) -> int:
    """Characters of `Doc 1(Title: "A (b)")`: up to the bracket that closes the title, 0 without a header."""
    first_line = passage.partition("\n")[0]
    start = first_line.find("(Title: ")
    if start < 0:
        return 0
    if (quoted := first_line.find('")', start)) >= 0 and first_line.startswith('(Title: "', start):
        return quoted + 2
    depth = 0
    for position, char in enumerate(first_line[start:], start=start):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            return position + 1
    return 0


def read_rollouts(paths: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """Rows with `question`, `golden_answers` and `response` or `turns`. Raises `DataError` naming file and line."""
    for path in paths:
        with path.open("rb") as file:  # bytes, so that only \n ends a line
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    json.dumps(row, ensure_ascii=False).encode()  # halves of surrogate pairs have no encoding
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}: line {number} is not JSON ({error})") from None
                if lacking := _lacking(row):
                    raise DataError(f"{path}: line {number} lacks {lacking}; repair it or take it out")
                yield row


def _lacking(row: Any) -> str:
    """What a row would need to be judged; empty when it has all."""
    if not isinstance(row, dict) or not isinstance(row.get("question"), str):
        return "a question"
    if not _all(str, row.get("golden_answers")):
        return "golden_answers, a list of texts"
    if not isinstance(row.get("response"), str) and row.get("turns") is None:
        return "response or turns"
    if not _all(dict, row.get("turns") or []) or not all(map(_is_turn, row.get("turns") or [])):
        return "turns that each have a completion, and perhaps an observation and calls"
    if calls_tools(row) and not (_all(dict, row.get("prompt")) and all(map(_is_message, row["prompt"]))):
        return "the prompt of its tool calls, messages of role and content"
    return "" if not calls_tools(row) or _all(str, row.get("tools") or []) else "names in its tools"


def _is_turn(turn: Mapping[str, Any]) -> bool:
    texts = [turn.get("completion"), turn.get("observation") or ""]
    return _all(str, texts) and _all(dict, turn.get("calls") or [])


def _is_message(message: Mapping[str, Any]) -> bool:
    return _all(str, [message.get("role"), message.get("content")])


def _all(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def command(arguments: argparse.Namespace) -> None:
    check_template(arguments.template)
    paths = [existing_file(path) for path in arguments.input]
    tools, opening = tool_settings(paths, arguments.tools, arguments.search_top_k, arguments.forced_opening)
    result = select(
        read_rollouts(paths),
        template=arguments.template,
        max_passage_words=arguments.max_passage_words,
        max_per_question=arguments.max_per_question,
        tools=tools,
        forced_opening=opening,
    )
    console.print(count_table("rollouts", {name: result.counts[name] for name in ("read", *DROPPED, "kept")}))
    if not result.rows:
        raise DataError("no rollout was kept, so nothing is written")
    write_parquet(arguments.output, result.rows, SFT_SCHEMA)
    console.print(f"wrote {arguments.output}")


def main(argv: list[str] | None = None) -> int:
    options = parser("traces", __doc__, EXAMPLES)
    options.add_argument("--input", required=True, nargs="+", help="JSON lines: published rollouts, or a run's own")
    options.add_argument("--output", required=True, help="the parquet file to write, one `messages` column a row")
    options.add_argument("--template", default="search_r1", help=f"prompt: {', '.join(TEMPLATES)} (default: search_r1)")
    options.add_argument("--max-passage-words", type=positive, help="shorten each passage to so many words")
    options.add_argument("--max-per-question", type=positive, help="keep so many demonstrations of a question")
    options.add_argument("--tools", nargs="+", default=[], help="modules of the tools that tool rollouts called")
    options.add_argument("--search-top-k", type=positive, help="they had search too, with this environment.top_k")
    options.add_argument("--forced-opening", default="", help="their environment.forced_opening, e.g. <think>")
    return exit_code(command, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
