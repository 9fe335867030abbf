"""Evaluate a model: greedy, with the rollout code of training and no trainer.

`./evaluate.sh model=FOLDER data=test.parquet [key=value …]`; every other setting is a key of configs/base.yaml.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from search_r1.compose import compose_config
from search_r1.config import Config
from search_r1.errors import ConfigError, SearchR1Error
from search_r1.rollout.blocking import end_process
from search_r1.trainer.validation import ValidationResult

SHORT = {
    "model": "model.path",
    "data": "data.val_files",
    "retriever": "environment.retriever_urls",
    "limit": "data.max_val_questions",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 after one sentence about what is wrong, or 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="search_r1.evaluate",
        description=__doc__,
        epilog=f"Short names: {', '.join(f'{k} ({v})' for k, v in SHORT.items())}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="folder for questions.jsonl and summary.json (runs/eval/…)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        config = compose_config("eval", list(expand(options.overrides)))
        evaluate(config, options.output)
    except SearchR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing is written before the last question has ended\n")
        return 130
    return 0


def expand(overrides: Sequence[str]) -> Iterator[str]:
    """Short names to keys; single values to lists where a list is wanted."""
    for override in overrides:
        name, separator, value = override.partition("=")
        key = SHORT.get(name, name) if separator else name
        is_list = key in ("data.val_files", "environment.retriever_urls") and not value.startswith("[")
        yield f"{key}=[{value}]" if is_list else f"{key}{separator}{value}"


def evaluate(config: Config, output: Path | None = None) -> ValidationResult:
    """Roll out every question of `data.val_files` and write one JSON line a question and a summary.

    Raises:
        SearchR1Error: a missing model, data file or retriever.
    """
    from search_r1.backends.tokenizer import load_tokenizer
    from search_r1.data.questions import load_questions, spread
    from search_r1.trainer.build import build_engine, build_rollouts, check_inputs, check_questions
    from search_r1.trainer.console import RunConsole, comparison_table
    from search_r1.trainer.run_folder import RunFolder, new_run_path
    from search_r1.trainer.validation import validate

    if not config.model.path or not config.data.val_files:
        raise ConfigError("evaluation needs model=FOLDER and data=FILE.parquet (see ./evaluate.sh --help)")
    questions = spread(load_questions(config.data.val_files, config.data.template), config.data.max_val_questions)
    check_inputs(config)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    check_questions(config, tokenizer, questions)
    console = RunConsole(0)
    with ExitStack() as stack:
        engine = build_engine(config)
        stack.callback(engine.close)
        rollouts = build_rollouts(config, engine, tokenizer)
        with console:
            result = validate(
                rollouts.manager,
                questions,
                rollouts.encode_prompt,
                config,
                on_progress=lambda done, total: console.phase("evaluating", done, total),
            )
    folder = RunFolder(output or new_run_path(config).parent.parent / "eval" / new_run_path(config).name)
    folder.write_text("questions.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in result.records))
    folder.write_json("summary.json", {"all": result.overall, **result.by_source, "metrics": result.metrics})
    console.console.print(comparison_table(None, {**result.by_source, "all": result.overall}))
    console.say(f"results: {folder.path}")
    return result


if __name__ == "__main__":
    end_process(main())
