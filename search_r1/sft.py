"""Supervised fine-tuning: `python -m search_r1.sft model.path=… data.train_files=[…] output_dir=…`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from search_r1.compose import build_config, compose_dict, load_yaml, to_yaml
from search_r1.errors import ConfigError, SearchR1Error
from search_r1.llamafactory_keys import translate_llamafactory
from search_r1.redaction import redact
from search_r1.sft_config import SFTConfig, check_sft

logger = logging.getLogger(__name__)
EPILOG = """Settings are key=value overrides of configs/sft.yaml. With --llamafactory they come from a training file of
LLaMA-Factory, and overrides stand above it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 after one sentence about what is wrong."""
    parser = argparse.ArgumentParser(prog="search_r1.sft", description=__doc__, epilog=EPILOG)
    parser.add_argument("--llamafactory", metavar="FILE", help="a LLaMA-Factory training file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    handler = RichHandler(console=console, show_path=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    try:
        config = compose_sft(options.overrides, options.llamafactory)
        check_sft(config)
        return run(config, console)
    except SearchR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def run(config: SFTConfig, console: Console) -> int:
    """Train; exit status 0, or 130 after an interrupt and a sentence about what the same command would do."""
    try:
        train(config, console)
    except KeyboardInterrupt:
        kept = any(Path(config.output_dir).glob("checkpoints/step_*/trainer.json"))
        then = "goes on from the last checkpoint (trainer.resume=auto)" if kept else "starts anew, without a checkpoint"
        sys.stderr.write(f"interrupted: the same command {then}\n")
        return 130
    return 0


def compose_sft(overrides: Sequence[str], llamafactory: str | None = None) -> SFTConfig:
    """configs/sft.yaml, a LLaMA-Factory file on top of it, overrides on top of both.

    Raises:
        ConfigError: unknown or wrong keys, all named.
    """
    values = compose_dict("sft", overrides)
    if llamafactory:
        given = load_yaml(Path(llamafactory))
        if not isinstance(given, dict):
            raise ConfigError(f"{llamafactory} must hold keys and values, as LLaMA-Factory's training files do")
        try:
            settings, notes = translate_llamafactory(given, values["cluster"]["num_workers"])
        except ConfigError as error:
            raise ConfigError(f"{llamafactory}: {error}") from error
        for note in notes:
            logger.info("%s: %s", llamafactory, note)
        overridden = {override.lstrip("+").partition("=")[0] for override in overrides}
        for key, value in settings.items():
            if key not in overridden:
                _put(values, key, value)
    return build_config(SFTConfig, values)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        values = values[group]
    values[name] = value


def train(config: SFTConfig, console: Console) -> dict[str, Any]:
    """Run a checked configuration; the model, its tokenizer and the run's files go into `output_dir`."""
    from search_r1.backends.model import check_model_folder, context_window
    from search_r1.backends.tokenizer import load_tokenizer
    from search_r1.data.chat_templates import choose_chat_template
    from search_r1.data.sft_examples import read_examples, split_validation
    from search_r1.trainer.build_sft import build_learner
    from search_r1.trainer.run_folder import RunFolder, versions
    from search_r1.trainer.sft_loop import plan_batches
    from search_r1.trainer.sft_run import SFTRun, find_sft_resume, fixed_settings
    from search_r1.trainer.tracking import build_trackers

    check_model_folder(config.model.path)
    checkpoint = find_sft_resume(config)
    if config.trainer.resume == "never" and (Path(config.output_dir) / "settings.json").exists():
        logger.warning("the run in %s is written over, since trainer.resume=never", config.output_dir)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    choose_chat_template(tokenizer, config.data.chat_template)
    window = context_window(config.model.path, config.model.trust_remote_code)
    if window < config.data.max_length:
        logger.info("data.max_length=%d is lowered to the %d positions of the model", config.data.max_length, window)
    data = replace(config.data, max_length=min(window, config.data.max_length))
    examples = read_examples(data, data.train_files, tokenizer)
    validation = read_examples(data, data.val_files, tokenizer)
    if config.data.val_size:
        examples, validation = split_validation(examples, config.data.val_size, config.seed)
    plan = plan_batches([len(example.token_ids) for example in examples], config.training, config.seed)
    logger.info("%d examples, %d for validation, %d steps", len(examples), len(validation), len(plan))
    pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
    settings = redact(asdict(config))
    with ExitStack() as stack:
        trackers = build_trackers(config.tracking, Path(config.output_dir), settings)
        for tracker in trackers:
            stack.callback(tracker.close)
        if trackers and checkpoint is None:  # should this fail, a folder that trackers wrote to is known again
            RunFolder(Path(config.output_dir)).write_json("settings.json", fixed_settings(config))
        learner = build_learner(config, len(plan), pad_token_id, stack)
        run = SFTRun(config, learner, examples, validation, plan, trackers, tokenizer.save_pretrained, console)
        if checkpoint:
            run.restore(checkpoint)
        run.folder.write_text("config.yaml", to_yaml(settings))
        run.folder.write_json("versions.json", versions())
        summary = run.fit()
    logger.info("saved %s", config.output_dir)
    return summary


if __name__ == "__main__":
    sys.exit(main())
