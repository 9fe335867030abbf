"""Tokens per second of a policy update: token-budget micro-batches against a fixed number of padded rows.

Lengths are those of real rollouts (prompt, completions and retrieved passages), divided by `--scale` on a CPU. All
sides make the same optimizer step, with the same model code, loss and memory budget; they differ in the cut alone:

    fixed rows, padded to the batch      rows in the order they come, as many as the budget holds of the longest of
                                         the whole batch; every row padded to that longest one
    fixed rows, padded to the longest    the same rows, each micro-batch padded to its own longest
    token budget                         ours: sorted by length (packed end to end on CUDA), filled to the budget

On a CPU one thread works and seconds are CPU seconds, which do not depend on what else the machine does.

    python benchmarks/update.py [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.report import finish  # noqa: E402
from search_r1.backends.policy import LocalPolicy, empty_like, to_device  # noqa: E402
from search_r1.backends.sharding import Replicated  # noqa: E402
from search_r1.config import Config, ModelConfig, PolicyConfig  # noqa: E402
from search_r1.data.micro_batches import select_rows  # noqa: E402
from search_r1.prompts import TEMPLATES, normalize_question  # noqa: E402
from search_r1.types import RolloutBatch, TrainBatch  # noqa: E402

RECORDED = (
    (188, 63), (213, 88), (578, 46), (638, 69), (660, 71), (690, 146), (702, 69), (708, 133), (718, 117), (727, 195),
    (736, 110), (745, 137), (749, 134), (759, 176), (769, 118), (776, 161), (786, 160), (793, 146), (796, 169),
    (820, 215), (967, 347), (1085, 90), (1114, 161), (1147, 71), (1177, 109), (1203, 111), (1227, 136), (1250, 102),
    (1279, 191), (1292, 209), (1307, 177), (1333, 255), (1382, 148), (1584, 308), (1652, 137), (1674, 146), (1721, 130),
    (1732, 169), (1757, 175), (1799, 168), (1865, 227), (1929, 231), (1969, 179), (2074, 188), (2311, 228), (2618, 259),
    (2840, 199), (3226, 355),
)  # fmt: skip
"""Tokens of a trajectory and how many of them were sampled: every fifth of 240 rollouts, sorted."""
SIDES = ("fixed rows, padded to the batch", "fixed rows, padded to the longest", "token budget")


def real_lengths() -> list[tuple[int, int]]:
    """Tokens and sampled tokens of each rollout in the shared data, else of the recorded ones."""
    shared = Path(os.environ.get("SEARCH_R1_SHARED", ROOT.parent / "shared")) / "data"
    if not (shared / "traces").is_dir():
        return list(RECORDED)
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    found = []
    for file in sorted((shared / "traces").glob("*.jsonl")):
        for row in map(json.loads, file.read_text().split("\n")[:-1]):
            prompt = TEMPLATES["search_r1"].format(question=normalize_question(row["question"]))
            parts = re.split(r"(<information>.*?(?:</information>|$))", row["response"], flags=re.DOTALL)
            counts = [len(tokenizer(text).input_ids) for text in (prompt, *parts)]
            found.append((sum(counts), sum(counts[1::2])))
    return found


def sample(lengths: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Evenly over the distribution, its longest included, in random order."""
    ordered = sorted(lengths, reverse=True)
    chosen = [ordered[i * len(ordered) // count] for i in range(count)]
    random.Random(0).shuffle(chosen)
    return chosen


def make_batch(lengths: list[tuple[int, int]], vocab_size: int) -> TrainBatch:
    """Random tokens of these lengths; the sampled ones stand at the end of each row."""
    generator = torch.Generator().manual_seed(0)
    totals, sampled = (torch.tensor(column)[:, None] for column in zip(*lengths, strict=True))
    columns = torch.arange(int(totals.max()))[None]
    attention = columns < totals
    mask = attention & (columns >= totals - sampled.clamp(min=1))
    noise = torch.randn(attention.shape, generator=generator).where(mask, 0.0)
    ids = torch.randint(0, vocab_size, attention.shape, generator=generator)
    rollout = RolloutBatch(ids, attention, mask, -5.0 * mask, noise[:, 0], torch.arange(len(lengths)))
    return TrainBatch(rollout, noise)


def whole_rows(batch: Any, rows: slice) -> Any:
    """These rows with all their padding."""

    def cut(value: Any) -> Any:
        if isinstance(value, RolloutBatch):
            return whole_rows(value, rows)
        return value[rows] if isinstance(value, torch.Tensor) else value

    return replace(batch, **{field.name: cut(getattr(batch, field.name)) for field in fields(batch)})


def micro_batches(side: str, policy: LocalPolicy, batch: TrainBatch, budget: int) -> list[TrainBatch]:
    if side == SIDES[2]:
        return [select_rows(batch, rows) for rows in policy.layout.rows(batch.rollout)]
    num_rows, longest = batch.rollout.input_ids.shape
    size = max(budget // longest, 1)
    cuts = [slice(start, start + size) for start in range(0, num_rows, size)]
    if side == SIDES[0]:
        return [whole_rows(batch, cut) for cut in cuts]
    return [select_rows(batch, range(num_rows)[cut]) for cut in cuts]


def update(policy: LocalPolicy, parts: list[TrainBatch], batch: TrainBatch) -> tuple[float, float]:
    """Seconds and gradient norm of one optimizer step."""
    num_tokens = int(batch.rollout.loss_mask.sum())

    def loss(part: TrainBatch) -> Any:
        moved = to_device(part, policy.trainable.device)
        return policy.objective(policy.module, moved, num_tokens, len(batch.rollout.rewards))

    on_gpu = policy.trainable.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    metrics = policy.trainable.step(parts, loss, lambda: empty_like(batch))
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, metrics["grad_norm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=64, help="trajectories in the batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=None, help="divide lengths by this (4 on a CPU, 1 on CUDA)")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    scale = options.scale or (1.0 if on_gpu else 4.0)
    budget = int(2 * 4096 / scale)
    if not on_gpu:
        torch.set_num_threads(1)
    width, layers = (1024, 12) if on_gpu else (256, 2)
    lengths = sample(real_lengths(), options.rows)
    lengths = [(max(round(total / scale), 2), max(round(sampled / scale), 1)) for total, sampled in lengths]
    batch = make_batch(lengths, vocab_size=2048)
    with tempfile.TemporaryDirectory() as folder:
        dimensions = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128, "vocab_size": 2048}
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **dimensions, **heads)).save_pretrained(folder)
        model = ModelConfig(path=folder, dtype="bfloat16" if on_gpu else "float32")
        config = Config(model=model, policy=PolicyConfig(max_tokens_per_micro_batch=budget))
        policy = LocalPolicy(config, Replicated(options.device), 1000)
    parts = {side: micro_batches(side, policy, batch, budget) for side in SIDES}
    norms = {side: update(policy, parts[side], batch)[1] for side in SIDES[::-1]}
    assert max(norms.values()) < 1.1 * min(norms.values()), f"the sides disagree: {norms}"
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side in SIDES:
            seconds[side].append(update(policy, parts[side], batch)[0])
    num_tokens = sum(total for total, _ in lengths)
    speed = {side: num_tokens / statistics.median(times) for side, times in seconds.items()}
    packed = policy.layout.packed
    rows = [
        {
            "cut": side,
            "micro-batches": len(parts[side]),
            "padding": f"{1 - num_tokens / computed(parts[side], packed and side == SIDES[2]):.0%}",
            "seconds": statistics.median(seconds[side]),
            "tokens/s": speed[side],
        }
        for side in SIDES
    ]
    longest = max(total for total, _ in lengths)
    title = f"{options.rows} trajectories, {num_tokens} tokens, longest {longest}, at most {budget} tokens at a time"
    ratio = speed[SIDES[2]] / speed[SIDES[0]]
    what = "token budget / fixed rows padded to the batch"
    finish("update", title, rows, ratio, what, device=options.device, scale=scale, packed=packed, rounds=options.rounds)


def computed(parts: list[TrainBatch], packed: bool) -> int:
    """Tokens the forward passes handle, padding included."""
    rollouts = [part.rollout for part in parts]
    return sum(int(r.attention_mask.sum()) if packed else r.input_ids.numel() for r in rollouts)


if __name__ == "__main__":
    main()
