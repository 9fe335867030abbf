"""Seconds of a weight sync into a running vLLM engine against a plain copy of the same bytes.

The sync is all of it: generation paused, buckets packed and sent, loaded and fused by the engine's process, the prefix
cache dropped, generation resumed. The plain copy writes the same tensors over others of the same shapes, in this
process. Rounds alternate. The model is random, and never more than one bucket of it is held twice.

    python benchmarks/weight_sync.py [--width 768] [--layers 12] [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the engine's process copies at the same time

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.report import finish  # noqa: E402
from benchmarks.rollout import SCALES, write_model  # noqa: E402

SIDES = ("plain copy", "weight sync")


def seconds_of(work: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy(weights: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        targets[name].copy_(weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--width", type=int, default=0, help="of the model; a multiple of 128")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    from search_r1.engines.vllm_engine import VLLMEngine

    on_cpu = options.device == "cpu"
    width = options.width or (768 if on_cpu else 2048)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, replace(SCALES[options.device], width=width, layers=options.layers))
        engine = VLLMEngine(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            max_batch_size=8,
            cpu_cache_gib=0.25,
            weight_transfer="shm" if on_cpu else "ipc",
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        targets = {name: torch.empty_like(weight) for name, weight in weights.items()}
        work: dict[str, Callable[[], None]] = {
            "plain copy": lambda: copy(weights, targets),
            "weight sync": lambda: engine.load_weights(weights.items()),
        }
        for turn in range(options.rounds + 1):
            for side in SIDES:
                taken = seconds_of(work[side], options.device)
                if turn:  # the first one warms up
                    seconds[side].append(taken)
        engine.close()
    report(options.device, sum(weight.nbytes for weight in weights.values()), len(weights), seconds)


def report(device: str, num_bytes: int, num_weights: int, seconds: dict[str, list[float]]) -> None:
    median = {side: statistics.median(taken) for side, taken in seconds.items()}
    rows = [
        {"side": side, "seconds": median[side], "bytes": float(num_bytes), "GB/s": num_bytes / median[side] / 1e9}
        for side in SIDES
    ]
    rounds = len(seconds["plain copy"])
    ratio = median["weight sync"] / median["plain copy"]
    title = f"{num_weights} weights, {num_bytes / 2**20:.0f} MiB, {rounds} rounds"
    finish("weight_sync", title, rows, ratio, "sync / copy", device=device, rounds=rounds, all_seconds=seconds)


if __name__ == "__main__":
    main()
