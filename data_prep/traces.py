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
from data_prep.tool_traces import calls_tools, tool_fault, tool_messages, tool_schemas
from search_r1.errors import DataError
from search_r1.prompts import TEMPLATES, check_template, prompt_messages
from search_r1.rewards.exact_match import em

EXAMPLES = """\
  python -m data_prep.traces --input traces.jsonl --output sft.parquet --max-passage-words 40
  python -m data_prep.traces --input runs/mine/latest/trajectories/*.jsonl --output sft.parquet --max-per-question 2
  python -m data_prep.traces --input runs/tools/latest/trajectories/*.jsonl --output sft.parquet \\
      --tools examples.tools.functions --search-top-k 2"""

DROPPED = ("not well formed", "no search", "wrong answer", "repeated response", "enough of its question")

_TAG = re.compile(r"<information>.*?</information>|</?(?:think|search|information|answer)>", re.DOTALL)
_TAG_LETTERS = {
    "<think>": "t", "</think>": "T", "<search>": "s", "</search>": "S", "<answer>": "a", "</answer>": "A",
    "<information>": "x", "</information>": "x",
}  # fmt: skip
_WELL_FORMED = re.compile(r"(?:tT|sSi)*aA")
_END_OF_TEXT = re.compile(r"(?:<\|[^|<>]*\|>|</s>)\s*$")
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
    tools: str | None = None,
) -> Selection:
    """Rejection sampling. The whole response, observations included, becomes one assistant message; calls and results
    of the tool environment become turns of their own.

    Args:
        max_passage_words: keep so many words of each passage inside an information block.
        max_per_question: keep the first so many demonstrations of a question.
        tools: JSON of the schemas that tool rollouts were told.

    Raises:
        DataError: a tool rollout, without `tools`.
    """
    result, responses, per_question = Selection(), set(), Counter[str]()
    for rollout in rollouts:
        response, reason = _judged(rollout)
        if not reason and response in responses:
            reason = "repeated response"
        if not reason and max_per_question is not None and per_question[rollout["question"]] >= max_per_question:
            reason = "enough of its question"
        result.counts["read"] += 1
        result.counts[reason or "kept"] += 1
        if reason:
            continue
        responses.add(response)
        per_question[rollout["question"]] += 1
        row = {"data_source": str(rollout.get("data_source") or "unknown"), "question": rollout["question"]}
        if calls_tools(rollout):
            if tools is None:
                raise DataError(
                    f"the rollout of {rollout['question']!r} calls tools: name their modules with --tools, and with "
                    "--search-top-k the top_k of search, so that the demonstrations tell of them as the rollouts did"
                )
            row |= {"messages": tool_messages(rollout, _END_OF_TEXT), "tools": tools}
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
        return json.dumps(tool_messages(rollout, _END_OF_TEXT)), tool_fault(rollout)
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
        passages = _PASSAGE.split(block[2])
        return block[1] + "".join(_first_words(passage, max_words) for passage in passages) + block[3]

    return _INFORMATION.sub(shorten, response)


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
                except ValueError as error:
                    raise DataError(f"{path}: line {number} is not JSON ({error})") from None
                if not _is_rollout(row):
                    raise DataError(f"{path}: line {number} lacks question, golden_answers, or response or turns")
                yield row


def _is_rollout(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("question"), str)
        and isinstance(row.get("golden_answers"), list)
        and (isinstance(row.get("response"), str) or isinstance(row.get("turns"), list))
    )


def command(arguments: argparse.Namespace) -> None:
    check_template(arguments.template)
    paths = [existing_file(path) for path in arguments.input]
    has_tools = arguments.tools or arguments.search_top_k
    result = select(
        read_rollouts(paths),
        template=arguments.template,
        max_passage_words=arguments.max_passage_words,
        max_per_question=arguments.max_per_question,
        tools=tool_schemas(arguments.tools, arguments.search_top_k) if has_tools else None,
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
    return exit_code(command, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
