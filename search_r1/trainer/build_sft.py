"""Where supervised fine-tuning runs: in this process, or on the workers that reinforcement learning has too."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from search_r1.backends.model import sequence_cost
from search_r1.backends.sharding import build_sharding
from search_r1.backends.supervised import SupervisedPolicy
from search_r1.sft_config import SFTConfig
from search_r1.trainer.sft_loop import Learner


def build_sft_role(config: SFTConfig, total_steps: int, pad_token_id: int) -> dict[str, Any]:
    """The one role of a worker; runs inside it, after it joined the process group."""
    torch.manual_seed(config.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    learner = SupervisedPolicy(
        config.model,
        config.optim,
        build_sharding(config.sharding, config.model.dtype, device),
        total_steps,
        pad_token_id=pad_token_id,
        max_tokens_per_micro_batch=config.training.max_tokens_per_micro_batch,
        packing=config.training.packing,
    )
    return {"policy": learner}


def build_learner(config: SFTConfig, total_steps: int, pad_token_id: int, stack: ExitStack) -> Learner:
    """What must be shut down is pushed on `stack`."""
    if config.cluster.launcher == "local":
        learner: Learner = build_sft_role(config, total_steps, pad_token_id)["policy"]
        return learner
    from search_r1.cluster import placement
    from search_r1.cluster.remote_learner import RemoteLearner
    from search_r1.cluster.worker_group import WorkerGroup

    if Path(config.model.path).is_dir():  # workers start in another folder
        config = replace(config, model=replace(config.model, path=str(Path(config.model.path).resolve())))
    stack.callback(placement.connect(config.cluster))
    group = WorkerGroup(config.cluster, partial(build_sft_role, config, total_steps, pad_token_id))
    stack.callback(group.close)
    group.check_shared(Path(config.output_dir).resolve())
    return RemoteLearner(group, sequence_cost(config.model.path, config.model.trust_remote_code))
