"""Train with PPO or GRPO: `python -m search_r1.main --config-name grpo key=value …`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from search_r1.compose import compose_config, to_yaml
from search_r1.config import Config
from search_r1.config_checks import check_training
from search_r1.errors import SearchR1Error
from search_r1.redaction import redact
from search_r1.rollout.blocking import end_process

logger = logging.getLogger(__name__)
HELP = """Settings are key=value overrides of configs/base.yaml, where every key stands with a comment:
  data.train_files=[train.parquet] data.val_files=[test.parquet] model.path=FOLDER
  environment.retriever_urls=[http://127.0.0.1:8000/retrieve] trainer.total_steps=100
Search-R1's own names (actor_rollout_ref.actor.optim.lr=1e-6 …) are accepted too.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 after one sentence about what is wrong, or 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="search_r1.main", description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-name", default="grpo", help="a file in configs/: grpo or ppo (default: grpo)")
    parser.add_argument("--show-config", action="store_true", help="print the resolved settings and stop")
    parser.add_argument("--show-memory-plan", action="store_true", help="print what each GPU will hold and stop")
    parser.add_argument("--gpu-gib", type=float, default=None, help="memory of a GPU (default: this machine's, or 80)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        config = compose_config(options.config_name, options.overrides)
        if options.show_config:
            sys.stdout.write(to_yaml(redact(asdict(config))))
            return 0
        if options.show_memory_plan:
            sys.stdout.write(describe_memory(config, options.gpu_gib))
            return 0
        for warning in check_training(config):
            logger.warning("%s", warning)
        if config.cluster.gpus_per_worker:
            sys.stderr.write(describe_memory(config, options.gpu_gib))
        train(config)
    except SearchR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on from the last checkpoint\n")
        return 130
    return 0


def describe_memory(config: Config, gpu_gib: float | None) -> str:
    """The memory plan of a run, with the settings to change when it will not fit."""
    import torch

    from search_r1.backends.model import role_sizes
    from search_r1.trainer.build import needs_reference
    from search_r1.trainer.memory_plan import GIB, memory_plan, remedies, render

    here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    gpu_bytes = gpu_gib * GIB if gpu_gib else here or 80 * GIB
    sizes = role_sizes(config, needs_reference(config))
    plan = memory_plan(config, sizes, gpu_bytes)
    return render(plan, remedies(config, sizes, gpu_bytes), assumed=not (gpu_gib or here))


def train(config: Config) -> dict[str, object]:
    """Run a checked configuration to its end; returns the summary."""
    from search_r1.trainer.build import build_trainer
    from search_r1.trainer.checkpoints import find_resume
    from search_r1.trainer.run_folder import new_run_path, versions

    run_path, checkpoint = find_resume(config, new_run_path(config))
    with ExitStack() as stack:
        settings = redact(asdict(config))
        trainer = build_trainer(config, run_path, settings, stack)
        trainer.folder.write_text("config.yaml", to_yaml(settings))
        trainer.folder.write_json("versions.json", versions())
        return trainer.fit(checkpoint)


if __name__ == "__main__":
    end_process(main())
