"""Trajectories per second of the asynchronous schedule against lockstep, on one vLLM engine and one slow retriever.

Both sides roll out the same batches with the same engine, environment and retriever client; runs alternate. A random
model writes no tags, so a script stands in for what a trained one would decide, the same on both sides: how many
tokens a turn has (lognormal, as in real rollouts: most are short, a few are long) and whether it searches or answers.
The tokens themselves are sampled by the engine. Prompts are new in every run, so that nobody finds a warm prefix cache.

The retriever speaks HTTP. A query takes a lognormal time, 50 ms in the median and 500 ms at most, whatever the others
take; a request is answered when its slowest query is.

    python benchmarks/rollout.py [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny model gains nothing from more

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.report import finish  # noqa: E402
from search_r1.config import EnvironmentConfig, RolloutConfig  # noqa: E402
from search_r1.environments.async_retriever import GatheringRetrieverClient  # noqa: E402
from search_r1.environments.search import SearchEnvironment  # noqa: E402
from search_r1.rollout.manager import LLMGenerationManager  # noqa: E402
from search_r1.types import Completion, Prompt, Question, SamplingConfig, Trajectory  # noqa: E402

SCHEDULES = ("lockstep", "async")
LATENCY_MEDIAN_S, LATENCY_SIGMA, LATENCY_MAX_S = 0.05, 0.8, 0.5
ANSWER_SHARE = 0.3
"""Of the turns; with at most four searches a trajectory makes about two."""
PASSAGE = "The town lies on a river and was first named in a charter of the year 1234, which is kept there. "


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for a CPU or a GPU. Lengths in tokens."""

    num_trajectories: int
    max_batch_size: int
    prompt: int
    observation: int
    turn_median: float
    turn_max: int
    width: int
    layers: int


SCALES = {
    "cpu": Scale(64, 64, 64, 96, 24.0, 192, 128, 2),
    "cuda": Scale(512, 256, 256, 400, 80.0, 500, 1024, 16),
}
TURN_SIGMA = 0.9


class ScriptedTurns:
    """A vLLM engine whose turns have scripted lengths and actions, drawn from each turn's seed."""

    def __init__(self, engine: Any, scale: Scale) -> None:
        self._engine = engine
        self._scale = scale

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        draws = random.Random(seed)
        length = min(max(int(draws.lognormvariate(0, TURN_SIGMA) * self._scale.turn_median), 4), self._scale.turn_max)
        text = "<answer>a</answer>" if draws.random() < ANSWER_SHARE else f"<search>query {seed}</search>"
        sampled = await self._engine.agenerate(context, replace(sampling, max_new_tokens=length, stop=()), seed)
        return replace(sampled, text=text)

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """All at once, and back when the last one is done, as any engine does it."""

        async def together() -> list[Completion]:
            rows = zip(contexts, seeds, strict=True)
            return await asyncio.gather(*(self.agenerate(context, sampling, seed) for context, seed in rows))

        return asyncio.run(together())

    def load_weights(self, weights: Any) -> None:
        raise NotImplementedError("weights stay as they are here")

    def close(self) -> None:
        self._engine.close()


@contextmanager
def slow_retriever() -> Iterator[str]:
    """URL of a server that works on all queries of all requests at the same time."""
    draws = random.Random(0)
    document = {"document": {"id": "1", "contents": f'"Town"\n{PASSAGE}'}, "score": 1.0}

    async def retrieve(request: Request) -> Response:
        queries = json.loads(await request.body())["queries"]
        slowest = max(draws.lognormvariate(0, LATENCY_SIGMA) for _ in queries)
        await asyncio.sleep(min(LATENCY_MEDIAN_S * slowest, LATENCY_MAX_S))
        return Response(json.dumps({"result": [[document] * 3] * len(queries)}), media_type="application/json")

    app = Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def write_model(folder: str, scale: Scale) -> PreTrainedTokenizerFast:
    """A random Qwen2 and a tokenizer of bytes."""
    vocab = {token: number for number, token in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(vocab),
        hidden_size=scale.width,
        intermediate_size=4 * scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.width // 64,
        num_key_value_heads=max(scale.width // 128, 1),
        max_position_embeddings=4096,
        eos_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_prompts(run: int, scale: Scale) -> list[Prompt]:
    """Random ones, four trajectories each, never seen before."""
    draws = random.Random(run)
    groups = range(scale.num_trajectories // 4)
    contexts = [tuple(draws.randrange(1, 257) for _ in range(scale.prompt)) for _ in groups]
    return [
        Prompt(Question(f"q{group}", "random", "", (), ("a",)), group, contexts[group])
        for group in groups
        for _ in range(4)
    ]


def roll_out(
    engine: ScriptedTurns, environment: Any, schedule: str, run: int, scale: Scale
) -> tuple[float, list[Trajectory]]:
    """Seconds and trajectories of one batch. Runs of one round have the same script."""
    config = RolloutConfig(
        schedule=schedule,  # type: ignore[arg-type]
        max_turns=4,
        max_start_length=scale.prompt,
        max_response_length=scale.turn_max,
        max_obs_length=scale.observation,
        max_prompt_length=4000,
    )
    manager = LLMGenerationManager(engine, environment, config)
    sampling = SamplingConfig(scale.turn_max, temperature=1.0, seed=run // len(SCHEDULES))
    prompts = make_prompts(run, scale)
    start = time.perf_counter()
    trajectories = manager.run_llm_loop(prompts, sampling)
    seconds = time.perf_counter() - start
    manager.close()
    return seconds, trajectories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from search_r1.engines.vllm_engine import VLLMEngine

    scale = SCALES[options.device]
    with tempfile.TemporaryDirectory() as folder, slow_retriever() as url:
        tokenizer = write_model(folder, scale)
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        engine = ScriptedTurns(
            VLLMEngine(folder, dtype=dtype, max_batch_size=scale.max_batch_size, cpu_cache_gib=1.0), scale
        )
        encode = partial(tokenizer.encode, add_special_tokens=False)
        client = GatheringRetrieverClient([url])
        environment = SearchEnvironment(client, encode, tokenizer.decode, EnvironmentConfig(), scale.observation)
        seconds: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
        tokens: dict[str, list[int]] = {schedule: [] for schedule in SCHEDULES}
        requests: dict[str, int] = dict.fromkeys(SCHEDULES, 0)
        for run in range((options.rounds + 1) * len(SCHEDULES)):
            schedule = SCHEDULES[run % 2]
            taken, trajectories = roll_out(engine, environment, schedule, run, scale)
            stats = client.stats()
            if run >= len(SCHEDULES):  # the first round warms up
                seconds[schedule].append(taken)
                tokens[schedule].append(sum(sum(trajectory.loss_mask) for trajectory in trajectories))
                requests[schedule] += stats["requests"]
        engine.close()
        client.close()
    report(options.device, scale, seconds, tokens, requests)


def report(
    device: str,
    scale: Scale,
    seconds: dict[str, list[float]],
    tokens: dict[str, list[int]],
    requests: dict[str, int],
) -> None:
    median = {schedule: statistics.median(taken) for schedule, taken in seconds.items()}
    rounds = len(seconds["async"])
    rows = [
        {
            "schedule": schedule,
            "seconds": median[schedule],
            "trajectories/s": scale.num_trajectories / median[schedule],
            "sampled tokens/s": statistics.fmean(tokens[schedule]) / median[schedule],
            "search requests": requests[schedule] / rounds,
        }
        for schedule in SCHEDULES
    ]
    title = (
        f"{scale.num_trajectories} trajectories, {scale.max_batch_size} decoded together, "
        f"{statistics.fmean(tokens['async']):.0f} sampled tokens, {rounds} rounds"
    )
    ratio = median["lockstep"] / median["async"]
    finish("rollout", title, rows, ratio, "async / lockstep", device=device, rounds=rounds, all_seconds=seconds)


if __name__ == "__main__":
    main()
