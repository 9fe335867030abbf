"""The commands of docs/data.md, run."""

from __future__ import annotations

import glob
import importlib
import json
import re
import shlex
from pathlib import Path

import datasets
import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs" / "data.md"
COMMANDS = re.findall(r"^python -m (data_prep\.\w+) (.+)$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
RESPONSE = "<search>q</search><information>p</information><answer>Ann</answer>"
NEEDS_A_DOWNLOAD = {"--source nq": "cannot be loaded", "--wheel": "there is no such file"}


def make_inputs() -> None:
    rollout = json.dumps({"question": "who?", "golden_answers": ["Ann"], "response": RESPONSE})
    Path("runs/mine/latest/trajectories").mkdir(parents=True)
    for name in ("traces.jsonl", "runs/mine/latest/trajectories/step_000001.jsonl"):
        Path(name).write_text(rollout)
    Path("hotpot_dev_distractor_v1.json").write_text('[{"_id": "7", "question": "who?", "answer": "Ann"}]')
    qa = importlib.import_module("data_prep.qa")
    for source in ("nq", "hotpotqa"):
        out = f"data/{source}_train.parquet"
        qa.main(["--source", source, "--input", "hotpot_dev_distractor_v1.json", "--output", out])
    corpus = importlib.import_module("data_prep.corpus")
    Path("a.jsonl").write_text('{"id": "1", "title": "T", "text": "x"}')
    corpus.main(["a.jsonl", "--output", "articles.jsonl.gz"])


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 7


@pytest.mark.parametrize("module, options", COMMANDS)
def test_every_command_of_the_page_runs(
    module: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make_inputs()
    words = [path for word in shlex.split(options) for path in (sorted(glob.glob(word)) or [word])]
    code = importlib.import_module(module).main(words)
    said = capsys.readouterr().err
    expected = next((reason for option, reason in NEEDS_A_DOWNLOAD.items() if option in options), None)
    if expected:
        assert code == 2
        assert expected in said
    else:
        assert code == 0, said
        assert Path(words[words.index("--output") + 1]).is_file()
