"""Rollouts of the tool environment as demonstrations: the conversation that was had, calls and results as they were."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_r1.environments.search_tool import search_tool
from search_r1.environments.tool_registry import load_tools
from search_r1.environments.tools import json_body
from search_r1.errors import DataError
from search_r1.rewards.exact_match import em

Schemas = Mapping[str, Mapping[str, Any]]
"""What models are told of tools, by name."""

_RESPONSES = re.compile(r"<tool_response>.*</tool_response>", re.DOTALL)
_PASSAGES = re.compile(r'(?<=^\{"status": "success", "content": ")Doc 1\(Title: (?:[^"\\]|\\.)*(?="\}$)', re.MULTILINE)
_END_OF_TURN = re.compile(r"(?!</(?:think|tool_call|answer)>)(?:<[^<>\s]+>|\[[^\[\]\s]+\])$")
"""A control token in whatever spelling: `<|im_end|>`, `<end_of_turn>`, `</s>`, `[/INST]`."""


def calls_tools(rollout: Mapping[str, Any]) -> bool:
    """It was answered by tools at least once."""
    return any(turn.get("calls") for turn in rollout.get("turns") or ())


def tool_fault(rollout: Mapping[str, Any]) -> str:
    """Why a rollout is no demonstration, as `traces.fault`: a call failed, no answer, or not exactly a golden one."""
    *acting, last = rollout["turns"]
    statuses = [call.get("status") for turn in acting for call in turn.get("calls") or ()]
    if any(status != "success" for status in statuses):
        return "failed call"
    if rollout.get("status") != "answered" or last.get("observation"):
        return "not well formed"
    if not all(_RESPONSES.search(turn.get("observation") or "") for turn in acting):
        return "not well formed"
    return "" if em(str(rollout.get("answer") or ""), rollout["golden_answers"]) else "wrong answer"


def tool_messages(
    rollout: Mapping[str, Any], opening: str = "", shorten: Callable[[str], str] | None = None
) -> list[dict[str, str]]:
    """The question's messages, then turns and responses, without the end-of-turn tokens: a template writes them.

    Args:
        opening: environment.forced_opening, which every assistant header ended with; now turns begin with it.
        shorten: changes the passages that search gave.

    Raises:
        DataError: the headers did not end with `opening`.
    """
    messages = [dict(message) for message in rollout["prompt"]]
    for turn in rollout["turns"]:
        # A turn that stopped by itself did so at a control token, which its text ends with.
        stopped = turn.get("finish_reason") != "length"
        spoken = _END_OF_TURN.sub("", turn["completion"]) if stopped else turn["completion"]
        messages.append({"role": "assistant", "content": opening + spoken})
        observation = turn.get("observation") or ""
        if responses := _RESPONSES.search(observation):
            messages.append({"role": "user", "content": _shortened(responses[0], shorten)})
            if not observation.endswith(opening):
                raise DataError(
                    f"the rollout of {rollout['question']!r} was not made with --forced-opening {opening!r}: give the "
                    "run's environment.forced_opening, or leave it out"
                )
    return messages


def _shortened(responses: str, shorten: Callable[[str], str] | None) -> str:
    if shorten is None:
        return responses
    return _PASSAGES.sub(lambda found: json_body(shorten(json.loads(f'"{found[0]}"'))), responses)


def tool_schemas(modules: Sequence[str], search_top_k: int | None) -> Schemas:
    """All schemas that the rollouts' prompts may have told, in that order; search where `search_top_k` is given."""
    nobody: Any = None  # only the schema is wanted
    first = [search_tool(nobody, search_top_k, max_query_chars=0)] if search_top_k else []
    return {name: tool.schema for name, tool in load_tools(modules, first=first).items()}


def tool_settings(
    files: Iterable[Path], modules: Sequence[str], search_top_k: int | None, opening: str
) -> tuple[Schemas, str]:
    """The schemas that the rollouts in these files were told, and their forced opening.

    Where the options are not given (empty), they come from the config.yaml beside the folder of a run's trajectories.

    Raises:
        DataError: a run had something else than what is given, or than another run.
    """
    given = {"--tools": list(modules), "--search-top-k": search_top_k, "--forced-opening": opening}
    known: dict[str, Any] = {option: value for option, value in given.items() if value}
    for file in files:
        for option, value in _run_settings(file.absolute().parent).items():
            if known.setdefault(option, value) != value:
                raise DataError(
                    f"{file}: its run had {option} {value or 'unset'} (config.yaml), not {known[option] or 'unset'}: "
                    "leave the option out, and take runs of different settings one after the other"
                )
    known = {**given, **known}
    return tool_schemas(known["--tools"], known["--search-top-k"]), known["--forced-opening"]


def _run_settings(folder: Path) -> dict[str, Any]:
    from search_r1.compose import load_yaml

    file = folder.parent / "config.yaml" if folder.name == "trajectories" else folder
    config = load_yaml(file) if file.is_file() else None
    environment = config.get("environment") if isinstance(config, Mapping) else None
    if not isinstance(environment, Mapping) or environment.get("name") != "tools":
        return {}
    return {
        "--tools": list(environment.get("tools") or ()),
        "--search-top-k": environment.get("top_k") if environment.get("retriever_urls") else None,
        "--forced-opening": environment.get("forced_opening") or "",
    }


def told_schemas(rollout: Mapping[str, Any], schemas: Schemas) -> str:
    """JSON of the schemas that this rollout's prompt told: of the tools its row named, or of all.

    Raises:
        DataError: `schemas` lacks one of them.
    """
    names = rollout.get("tools")
    told = [schemas.get(name) for name in (schemas if names is None else names)]
    if not told or None in told:
        raise DataError(
            f"the rollout of {rollout['question']!r} calls tools ({', '.join(names or ['all of its run'])}): name "
            "their modules with --tools, and with --search-top-k the top_k of search, so that the demonstrations tell "
            "of them as the rollouts did"
        )
    return json.dumps(told)
