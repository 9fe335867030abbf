"""Where a training step's time goes with one worker and with two, and how much of it the engine idles.

The quick start's steps, on Ray, with its retrieval server: each side builds its workers anew, takes a step to warm up
and then some that count; sides alternate. On a CPU a worker has one core, on CUDA one GPU.

Seconds are those of a clock on the wall, so nothing else should run beside it.

    python benchmarks/scaling.py [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.report import finish  # noqa: E402
from search_r1.backends.tokenizer import load_tokenizer  # noqa: E402
from search_r1.compose import compose_config  # noqa: E402
from search_r1.config import Config  # noqa: E402
from search_r1.data.questions import QuestionStream, load_questions  # noqa: E402
from search_r1.rollout.manager import LLMGenerationManager  # noqa: E402
from search_r1.trainer.build import async_limits, build_ray_roles  # noqa: E402
from search_r1.trainer.rollouts import StepRollouts  # noqa: E402
from search_r1.trainer.step import Roles, Stopwatch, train_step  # noqa: E402
from search_r1.trainer.trainer import build_kl_controller, optimizer_steps  # noqa: E402
from search_r1.types import Completion, SamplingConfig  # noqa: E402

PHASES = ("rollout", "log_probs", "actor", "sync", "parity")
Times = dict[str, float]


class ClockedEngine:
    """An engine that adds up the seconds in which it samples anything."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self.busy_s = 0.0
        if hasattr(engine, "agenerate"):
            self.agenerate = self._agenerate

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        with self._lock:
            if self._running == 0:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self.busy_s += time.perf_counter() - self._since

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        with self._sampling():
            return self._engine.generate(contexts, sampling, seeds)  # type: ignore[no-any-return]

    async def _agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        with self._sampling():
            return await self._engine.agenerate(context, sampling, seed)  # type: ignore[no-any-return]


@contextmanager
def retrieval_server(folder: Path) -> Iterator[str]:
    """URL of a server over the quick start's corpus."""
    corpus, port_file = ROOT / "examples/quickstart/corpus.jsonl", folder / "port"
    command = [sys.executable, "-m", "retriever_server", "--retriever", "bm25", "--corpus", str(corpus)]
    server = subprocess.Popen(
        [*command, "--port", "0", "--port-file", str(port_file)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        while not (port_file.exists() and port_file.read_text().strip()):
            if server.poll() is not None:
                raise SystemExit(f"the retrieval server ended with {server.returncode}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}/retrieve"
    finally:
        server.terminate()
        server.wait()


def settings(num_workers: int, url: str, on_gpu: bool, overrides: Sequence[str]) -> Config:
    cluster = [f"cluster.num_workers={num_workers}", "cluster.cpus_per_worker=1"]
    cluster += ["cluster.gpus_per_worker=1"] if on_gpu else []
    return compose_config(
        "grpo", ["experiment=quickstart", f"environment.retriever_urls=[{url}]", *cluster, *overrides]
    )


def measure(config: Config, num_steps: int, folder: Path) -> list[Times]:
    """Seconds of each phase of each step after the first, `step` in all and `busy` sampling."""
    questions = load_questions(config.data.train_files, config.data.template)
    tokenizer = load_tokenizer(config.model.path)
    with ExitStack() as stack:
        roles = build_ray_roles(config, tokenizer, optimizer_steps(config, len(questions)), stack, folder)
        engine = ClockedEngine(roles.manager.engine)
        manager = LLMGenerationManager(engine, roles.manager.environment, config.rollout, async_limits(config))
        stack.callback(manager.close)
        return take_steps(config, replace(roles, manager=manager), engine, questions, num_steps)[1:]


def take_steps(
    config: Config, roles: Roles, engine: ClockedEngine, questions: Sequence[Any], num_steps: int
) -> list[Times]:
    stream = QuestionStream(questions, config.data.train_batch_size, seed=config.seed, shuffle=config.data.shuffle)
    rollouts, kl = StepRollouts(roles, stream, config, num_steps + 1), build_kl_controller(config)
    roles.sync_weights()
    found = []
    for step in range(1, num_steps + 2):
        watch, busy_before, start = Stopwatch(), engine.busy_s, time.perf_counter()
        with watch.phase("rollout"):
            trajectories = rollouts.take(step)
        train_step(roles, trajectories, config, step, kl, watch)
        times = {phase: watch.times.get(f"time/{phase}_s", 0.0) for phase in PHASES}
        found.append(times | {"step": time.perf_counter() - start, "busy": engine.busy_s - busy_before})
    rollouts.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=3, help="that count, in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of both sides")
    options = parser.parse_args()
    steps: dict[int, list[Times]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name, retrieval_server(Path(name)) as url:
        for _ in range(options.rounds):
            for num_workers, times in steps.items():
                config = settings(num_workers, url, options.device == "cuda", options.overrides)
                times += measure(config, options.steps, Path(name))
    rows = []
    for num_workers, times in steps.items():
        medians = {phase: statistics.median(one[phase] for one in times) for phase in (*PHASES, "step")}
        idle = statistics.median(1 - one["busy"] / one["step"] for one in times)
        rows.append({"workers": num_workers, **{f"{phase} s": s for phase, s in medians.items()}, "engine idle": idle})
    batch = config.data.train_batch_size * config.rollout.group_size
    title = f"Seconds of a step of {batch} trajectories, {config.engine.name} engine, median of {len(times)} steps"
    ratio = rows[0]["step s"] / rows[1]["step s"]
    facts = {"device": options.device, "rounds": options.rounds, "overrides": options.overrides}
    finish("scaling", title, rows, ratio, "step with one worker / with two", **facts)


if __name__ == "__main__":
    main()
