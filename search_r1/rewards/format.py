"""Is a trajectory well formed? Read from its own turns; no chat template has a say (see `registry` for one that opens
the first thought).

A valid sequence is (think (search information think)* answer) with only white space between the blocks. An
observation that the environment wrapped as information is one block whatever its text says; a policy that writes
`<information>` itself breaks the form.
"""

from __future__ import annotations

import re

from search_r1.types import Observation, Trajectory

_TAG = re.compile(r"<(/?)(think|search|answer|information)>")
_VALID = re.compile(r"think( search information think)* answer")
INFORMATION_START, INFORMATION_END = "<information>", "</information>"


def is_valid_format(trajectory: Trajectory) -> bool:
    """Whether the blocks of the whole trajectory, in order, make a valid sequence."""
    names: list[str] = []
    for turn in trajectory.turns:
        blocks = block_names(turn.completion.text)
        if blocks is None:
            return False
        names += blocks
        if turn.observation is not None:
            names.append("information" if is_information(turn.observation) else "other")
    return _VALID.fullmatch(" ".join(names)) is not None


def block_names(text: str) -> list[str] | None:
    """Names of the tag blocks a completion consists of, in order.

    None where the tags are not closed in turn, stand inside one another, or leave other text than white space between
    them; and where the policy wrote an information block itself.

    >>> block_names("<think>hm</think> <search>q</search>")
    ['think', 'search']
    """
    names: list[str] = []
    open_name, end = "", 0
    for tag in _TAG.finditer(text):
        closing, name = tag.groups()
        if closing:
            if name != open_name:
                return None
            names.append(name)
            open_name = ""
        else:
            if open_name or text[end : tag.start()].strip():
                return None
            open_name = name
        end = tag.end()
    if open_name or text[end:].strip() or "information" in names:
        return None
    return names


def is_information(observation: Observation) -> bool:
    """Whether the observation is an information block, not a correction."""
    text = observation.text.strip()
    return text.startswith(INFORMATION_START) and text.endswith(INFORMATION_END)


def information_texts(trajectory: Trajectory) -> list[str]:
    """What stands in each information block, as the policy saw it."""
    observations = [turn.observation for turn in trajectory.turns if turn.observation is not None]
    return [
        observation.text.strip().removeprefix(INFORMATION_START).removesuffix(INFORMATION_END)
        for observation in observations
        if is_information(observation)
    ]
