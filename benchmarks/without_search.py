"""Does the policy really search? `python benchmarks/without_search.py [MODEL_FOLDER]`.

Greedy exact match on the quick start's 600 test questions, once with the bundled corpus behind the server and once with
a server that finds nothing. The default is the policy that the newest quick start trained.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import finish  # noqa: E402
from search_r1.compose import compose_config  # noqa: E402
from search_r1.evaluate import evaluate  # noqa: E402

RETRIEVERS = {
    "bm25 over the bundled corpus": ["--retriever", "bm25", "--corpus", "examples/quickstart/corpus.jsonl"],
    "finds nothing": ["--retriever", "noise", "--noise", "empty"],
}
START_S = 120


@contextmanager
def retrieval_server(arguments: list[str], folder: Path) -> Iterator[str]:
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "retriever_server", *arguments, "--port", "0", "--port-file", str(port_file)]
    with (folder / "server.log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stderr=log) as server:
        try:
            deadline = time.monotonic() + START_S
            while not (port_file.is_file() and port_file.read_text().strip()):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the retrieval server did not start:\n{(folder / 'server.log').read_text()}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}/retrieve"
        finally:
            server.terminate()


def newest_policy() -> Path:
    policies = sorted((ROOT / "runs/quickstart/latest/checkpoints").glob("step_*/policy"))
    if not policies:
        raise SystemExit("no trained model under runs/quickstart/latest: run ./quickstart.sh first, or name a folder")
    return policies[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="folder of the model (default: of the newest quick start)")
    parser.add_argument("--limit", type=int, default=600, help="number of test questions (default: all 600)")
    arguments = parser.parse_args()
    model = (arguments.model or newest_policy()).resolve()
    os.chdir(ROOT)
    rows, scores = [], []
    for name, flags in RETRIEVERS.items():
        with tempfile.TemporaryDirectory() as temporary, retrieval_server(flags, Path(temporary)) as url:
            settings = [f"model.path={model}", f"environment.retriever_urls=[{url}]", "engine=hf"]
            settings += ["experiment=quickstart", f"data.max_val_questions={arguments.limit}"]
            settings += ["data.val_files=[examples/quickstart/test.parquet]"]
            overall = evaluate(compose_config("eval", settings), Path(temporary) / "eval").overall
        scores.append(overall["em"])
        rows.append(
            {
                "retriever": name,
                "exact match": overall["em"],
                "searches a question": overall["searches_per_question"],
                "valid actions": overall["valid_action_rate"],
            }
        )
    what = "exact match with a retriever that finds nothing"
    finish("without_search", f"{model.name}, {arguments.limit} questions", rows, scores[1], what, with_search=scores[0])


if __name__ == "__main__":
    main()
