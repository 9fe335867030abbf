"""Supervised fine-tuning: `python -m search_r1.sft model.path=… data.train_files=[…] output_dir=…`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from search_r1.backends.model import check_model_folder
from search_r1.backends.sharding import build_sharding
from search_r1.backends.supervised import SupervisedPolicy
from search_r1.backends.tokenizer import load_tokenizer
from search_r1.compose import build_config, compose_dict
from search_r1.config import ShardingConfig
from search_r1.data.sft_examples import read_examples
from search_r1.errors import ConfigError, SearchR1Error
from search_r1.protocols import Metrics
from search_r1.sft_config import SFTConfig, check_sft
from search_r1.trainer.sft_loop import plan_batches, run_sft

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 after one sentence about what is wrong."""
    parser = argparse.ArgumentParser(
        prog="search_r1.sft", description=__doc__, epilog="Settings are key=value overrides of configs/sft.yaml."
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    overrides = parser.parse_args(arguments).overrides
    console = Console(stderr=True)
    handler = RichHandler(console=console, show_path=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    try:
        config = build_config(SFTConfig, compose_dict("sft", overrides))
        check_sft(config)
        train(config, console)
    except SearchR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def train(config: SFTConfig, console: Console) -> None:
    """Train as configured and write the model, its tokenizer and metrics.jsonl into `output_dir`."""
    check_model_folder(config.model.path)
    output = Path(config.output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output_dir={output} is not empty: give a new folder")
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    examples = read_examples(config.data.train_files, tokenizer, config.data.max_length)
    validation = read_examples(config.data.val_files, tokenizer, config.data.max_length)
    plan = plan_batches([len(example.token_ids) for example in examples], config.training, config.seed)
    torch.manual_seed(config.seed)
    learner = SupervisedPolicy(
        config.model,
        config.optim,
        build_sharding(ShardingConfig(), device="cuda" if torch.cuda.is_available() else "cpu"),
        len(plan),
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        max_tokens_per_micro_batch=config.training.max_tokens_per_micro_batch,
    )
    logger.info("%d examples, %d for validation, %d steps", len(examples), len(validation), len(plan))
    output.mkdir(parents=True, exist_ok=True)
    with _progress(console) as progress, (output / "metrics.jsonl").open("wb") as file:
        task = progress.add_task("sft", total=len(plan), loss=float("nan"))

        def report(metrics: Metrics, step: int) -> None:
            file.write(orjson.dumps({"step": step, **metrics}) + b"\n")
            progress.update(task, completed=step, loss=metrics["sft/loss"])
            if "validation/loss" in metrics:
                logger.info("step %d: validation loss %.4f", step, metrics["validation/loss"])

        run_sft(learner, examples, validation, plan, config.training, report)
    learner.save_pretrained(str(output))
    tokenizer.save_pretrained(output)
    logger.info("saved %s", output)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


if __name__ == "__main__":
    sys.exit(main())
