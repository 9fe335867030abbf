"""Supervised fine-tuning from the command line: what it leaves behind, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1 import sft
from search_r1.report.page import write_report
from tests.model_factory import tiny_model_dir

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    row = {
        "messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "<answer> abc </answer>"}]
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 6)
    return [
        f"model.path={tiny_model_dir(tmp_path / 'start')}",
        f"data.train_files=[{tmp_path}/rows.jsonl]",
        f"data.val_files=[{tmp_path}/rows.jsonl]",
        f"output_dir={tmp_path}/tuned",
        "training.total_steps=4",
        "training.validate_every_steps=2",
        "optim.lr=1e-3",
    ]


def test_it_writes_a_model_that_loads_with_its_tokenizer_and_its_losses(arguments: list[str], tmp_path: Path) -> None:
    assert sft.main([*arguments, "tracking.backends=[tensorboard]"]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(tmp_path / "tuned")
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 4]
    assert rows[-1]["validation/loss"] < rows[0]["sft/loss"]
    summary = json.loads((tmp_path / "tuned" / "summary.json").read_text())
    assert (summary["steps"], summary["validation_loss"]) == (4, rows[-1]["validation/loss"])
    plot = ElementTree.parse(tmp_path / "tuned" / "loss.svg")
    lines = plot.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points", "").split()) for line in lines] == [4, 2]
    assert list((tmp_path / "tuned" / "tensorboard").iterdir())
    assert "validation/loss" in write_report(tmp_path / "tuned").read_text()


def test_the_same_seed_gives_the_same_metrics(arguments: list[str], tmp_path: Path) -> None:
    assert sft.main(arguments) == 0
    assert sft.main([*arguments, f"output_dir={tmp_path}/again"]) == 0
    assert (tmp_path / "tuned" / "metrics.jsonl").read_text() == (tmp_path / "again" / "metrics.jsonl").read_text()


def interrupted(folder: Path, whole: Path, step: int) -> Path:
    """What a run that was killed after its checkpoint of `step`, and some steps more, leaves behind."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("settings.json", "metrics.jsonl", "config.yaml"):
        shutil.copy(whole / name, folder / name)
    shutil.copytree(whole / "checkpoints" / f"step_{step:06d}", folder / "checkpoints" / f"step_{step:06d}")
    (folder / "checkpoints" / f".step_{step + 1:06d}.tmp").mkdir()
    return folder


SAVING = ("training.total_steps=7", "trainer.save_every_steps=2", "trainer.keep_checkpoints=9")


@pytest.mark.parametrize("how", [(), ("model.lora.rank=4",), ("optim.name=muon",), ("optim.schedule=linear",)])
def test_a_run_that_was_interrupted_goes_on_with_the_same_losses_and_weights(
    arguments: list[str], tmp_path: Path, how: tuple[str, ...]
) -> None:
    command = [*arguments, *SAVING, *how, "training.batch_tokens=60"]
    assert sft.main(command) == 0
    whole, folder = tmp_path / "tuned", interrupted(tmp_path / "killed", tmp_path / "tuned", step=4)
    assert sft.main([*command, f"output_dir={folder}"]) == 0
    assert (folder / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [path.name for path in sorted((folder / "checkpoints").glob("step_*"))] == ["step_000004", "step_000006"]


def test_a_run_goes_on_from_a_named_checkpoint_or_starts_anew(arguments: list[str], tmp_path: Path) -> None:
    assert sft.main([*arguments, *SAVING]) == 0
    metrics = (tmp_path / "tuned" / "metrics.jsonl").read_text()
    checkpoint = tmp_path / "tuned" / "checkpoints" / "step_000002"
    assert sft.main([*arguments, *SAVING, f"output_dir={tmp_path}/more", f"trainer.resume={checkpoint}"]) == 0
    assert (tmp_path / "more" / "metrics.jsonl").read_text().splitlines() == metrics.splitlines()[2:]
    folder = interrupted(tmp_path / "killed", tmp_path / "tuned", step=6)
    assert sft.main([*arguments, *SAVING, f"output_dir={folder}", "trainer.resume=never", "optim.lr=2e-3"]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert len(list((folder / "checkpoints").glob("step_*"))) == 3


class CtrlC(io.StringIO):
    """A console's file that is interrupted when it is told that the second step was taken."""

    def write(self, text: str) -> int:
        if text.startswith("step 2 of"):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_a_checkpoint_from_which_the_same_command_goes_on(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments.append("training.validate_every_steps=0")
    assert sft.main(arguments) == 0
    stopped = [*arguments, f"output_dir={tmp_path}/stopped"]
    assert sft.run(sft.compose_sft(stopped), Console(file=CtrlC())) == 130
    assert "the same command goes on from the last checkpoint" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["step_000002"]
    assert sft.main(stopped) == 0
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "stopped" / file).read_bytes() == (tmp_path / "tuned" / file).read_bytes()


def test_an_interrupted_run_without_a_checkpoint_says_so_and_may_be_begun_with_other_settings(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments += ["training.validate_every_steps=0", "trainer.save_every_steps=0"]
    assert sft.run(sft.compose_sft(arguments), Console(file=CtrlC())) == 130
    assert "the same command starts anew, without a checkpoint" in capsys.readouterr().err
    assert sft.main([*arguments, "training.total_steps=3"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_without_a_terminal_progress_tells_how_long_it_took_and_will_take(arguments: list[str]) -> None:
    said = io.StringIO()
    sft.train(sft.compose_sft([*arguments, "training.validate_every_steps=0"]), Console(file=said, width=200))
    assert re.search(r"^step 2 of 4: loss \d\.\d{4}, \d+ s, about \d+ s left$", said.getvalue(), re.MULTILINE)


def test_rows_longer_than_the_model_has_positions_are_left_out(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, config = tmp_path / "rows.jsonl", tmp_path / "start" / "config.json"
    long = file.read_text().splitlines()[0].replace("abc", "abc " * 50)
    file.write_text(f"{file.read_text()}{long}\n")
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 64}))
    with caplog.at_level("INFO"):
        assert sft.main(arguments) == 0
    assert "data.max_length=2048 is lowered to the 64 positions of the model" in caplog.text
    assert "1 examples are longer than data.max_length=64 tokens and are left out" in caplog.text
    assert json.loads((tmp_path / "tuned" / "summary.json").read_text())["examples"] == 6


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lr=5e-4", "holds an interrupted run with optim.lr=0.001, not 0.0005"),
        ("trainer.resume=nowhere", "trainer.resume=nowhere is no checkpoint folder"),
        ("data.max_rows=3", "interrupted run with data.max_rows=None, not 3"),
    ],
)
def test_a_run_with_other_settings_does_not_go_on_from_a_checkpoint(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    assert sft.main([*arguments, *SAVING]) == 0
    folder = interrupted(tmp_path / "killed", tmp_path / "tuned", step=2)
    assert sft.main([*arguments, *SAVING, f"output_dir={folder}", override]) == 2
    assert says in capsys.readouterr().err


def test_a_run_does_not_go_on_with_other_data(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft.main([*arguments, *SAVING, "training.batch_tokens=60"]) == 0
    folder = interrupted(tmp_path / "killed", tmp_path / "tuned", step=2)
    rows = tmp_path / "rows.jsonl"
    for other in (rows.read_text() * 2, rows.read_text().replace("abc", "town")):
        rows.write_text(other)
        assert sft.main([*arguments, *SAVING, "training.batch_tokens=60", f"output_dir={folder}"]) == 2
        assert "was made with other data or batches" in capsys.readouterr().err


def test_a_training_file_of_llama_factory_runs(arguments: list[str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    alpaca = {"instruction": "who?", "input": "", "output": "<answer> abc </answer>"}
    talk = {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "abc"}]}
    (data / "alpaca.json").write_text(json.dumps([alpaca] * 6))
    (data / "talks.jsonl").write_text((json.dumps(talk) + "\n") * 6)
    (data / "dataset_info.json").write_text(
        json.dumps({"one": {"file_name": "alpaca.json"}, "two": {"file_name": "talks.jsonl", "formatting": "sharegpt"}})
    )
    (tmp_path / "train.yaml").write_text(
        f"model_name_or_path: {tmp_path}/start\ndataset_dir: {data}\ndataset: one,two\ntemplate: qwen\n"
        f"output_dir: {tmp_path}/tuned\nfinetuning_type: lora\nlora_rank: 4\nval_size: 0.25\ncutoff_len: 64\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\nnum_train_epochs: 2.0\nlogging_steps: 1\n"
    )
    assert sft.main(["--llamafactory", f"{tmp_path}/train.yaml", "optim.lr=1e-3"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "validation/loss" in rows[-1]
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")


def test_the_example_with_all_three_forms_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = "examples/llamafactory/train.yaml"
    assert sft.main(["--llamafactory", file, f"output_dir={tmp_path}/tuned", "training.epochs=1"]) == 0
    summary = json.loads((tmp_path / "tuned" / "summary.json").read_text())
    assert (summary["examples"], summary["validation_examples"], summary["steps"]) == (5, 1, 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("dataset: mine\nlora_dropout: 0.1\n", "lora_dropout=0.1 is not supported"),
        ("- dataset\n", "must hold keys and values"),
        ("dataset: mine\ntemplate: qwenn\n", "there is no chat template 'qwenn', did you mean 'qwen'"),
        ("dataset: mine\ntemplate: llama3\n", "marks turns by"),
        ("dataset: mine\n", "dataset_info.json does not exist"),
    ],
)
def test_a_wrong_training_file_is_told_in_a_sentence(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(content)
    start, output = (argument for argument in arguments if argument.startswith(("model.path", "output_dir")))
    assert sft.main(["--llamafactory", str(file), start, output]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("output_dir=", "output_dir is not set"),
        ("model.path=nowhere", "nowhere does not exist"),
        ("data.train_files=[nothing.jsonl]", "nothing.jsonl does not exist"),
        ("optim.lr=0", "optim.lr=0.0 must be above 0"),
        ("training.batch_token=5", "did you mean training.batch_tokens?"),
        ("cluster.num_workers=2", "needs cluster.launcher=ray"),
        ("data.val_size=0.1", "set one of them"),
        ("data.dataset_info=nowhere.json", "nowhere.json does not exist"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_and_leaves_nothing_behind(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    assert sft.main([*arguments, override]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()


def test_a_folder_with_something_in_it_is_not_overwritten(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "mine.txt").write_text("keep")
    assert sft.main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "tuned").iterdir()] == ["mine.txt"]


def test_a_finished_run_is_written_over_only_where_that_is_asked_for(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft.main([*arguments, *SAVING]) == 0
    assert sft.main([*arguments, "trainer.resume=auto", "training.total_steps=2"]) == 2
    assert "holds a finished run: give a new folder, or trainer.resume=never" in capsys.readouterr().err
    assert sft.main([*arguments, "trainer.resume=never", "training.total_steps=2"]) == 0
    assert json.loads((tmp_path / "tuned" / "summary.json").read_text())["steps"] == 2
    assert not list((tmp_path / "tuned" / "checkpoints").glob("step_*"))
    (tmp_path / "tuned" / "settings.json").write_text('{"algorithm.advantage": "grpo"}')
    assert sft.main([*arguments, "trainer.resume=never"]) == 2
    assert "is not empty: give a new folder" in capsys.readouterr().err
