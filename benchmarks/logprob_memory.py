"""Peak memory of log-probs and entropy with their backward pass: chunked against plain, over a vocabulary of 150k.

Both sides compute the same numbers and the same gradients. Plain is the textbook form: all logits, log_softmax, gather,
entropy. Chunked is `search_r1.algorithms.log_probs`. On a CPU each measurement is a process of its own, and memory is
what the kernel counted (peak resident size, less what was resident before); on CUDA it is the allocator's peak.

    python benchmarks/logprob_memory.py [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import finish
from search_r1.algorithms.log_probs import chunked_log_probs

SIDES = ("plain", "chunked")
VOCAB_SIZE = 150_000


def plain_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = torch.nn.functional.linear(hidden, weight).float().log_softmax(dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    return log_softmax.gather(-1, targets[:, None]).squeeze(-1), entropy


def measure(side: str, num_tokens: int, width: int, device: str) -> dict[str, float]:
    """Bytes above what the inputs need, seconds, and numbers both sides must agree on."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(VOCAB_SIZE, width, generator=generator) / width**0.5).to(device).requires_grad_()
    targets = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator).to(device)
    before = _start_peak(device)
    start = time.perf_counter()
    if side == "plain":
        log_probs, entropy = plain_log_probs(hidden, weight, targets)
    else:
        log_probs, maybe = chunked_log_probs(hidden, weight, targets, 1.0, with_entropy=True)
        assert maybe is not None
        entropy = maybe
    (log_probs.mean() + 0.01 * entropy.mean()).backward()
    peak = _peak(device)
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "bytes": peak - before,
        "seconds": time.perf_counter() - start,
        "log_prob": float(log_probs.detach().mean()),
        "entropy": float(entropy.detach().mean()),
        "gradient": float(hidden.grad.norm() + weight.grad.norm()),
    }


def _start_peak(device: str) -> int:
    """Forget the peak so far; bytes held now."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=None, help="sampled tokens (1280 on a CPU, 8192 on CUDA)")
    parser.add_argument("--width", type=int, default=None, help="hidden size (128 on a CPU, 1024 on CUDA)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    tokens, width = options.tokens or (8192 if on_gpu else 1280), options.width or (1024 if on_gpu else 128)
    if options.measure:
        print(json.dumps(measure(options.measure, tokens, width, options.device)))
        return
    command = [sys.executable, __file__, "--device", options.device, "--tokens", str(tokens), "--width", str(width)]
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side in SIDES:
            out = subprocess.run([*command, "--measure", side], capture_output=True, text=True, check=True).stdout
            runs[side].append(json.loads(out))
    median = {side: {key: statistics.median(r[key] for r in runs[side]) for key in runs[side][0]} for side in SIDES}
    for key in ("log_prob", "entropy", "gradient"):
        plain, chunked = (median[side][key] for side in SIDES)
        assert abs(plain - chunked) < 1e-3 * abs(plain), f"{key}: {plain} and {chunked}"
    rows = [{"side": s, "peak MiB": median[s]["bytes"] / 2**20, "seconds": median[s]["seconds"]} for s in SIDES]
    ratio = median["plain"]["bytes"] / median["chunked"]["bytes"]
    title = f"log-probs and entropy with backward: {tokens} tokens, vocabulary {VOCAB_SIZE}, width {width}, float32"
    facts = {"device": options.device, "tokens": tokens, "width": width, "rounds": options.rounds}
    finish("logprob_memory", title, rows, ratio, "peak of plain / peak of chunked", **facts)


if __name__ == "__main__":
    main()
