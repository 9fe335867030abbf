"""Ask a model a question and watch it search: `python -m search_r1.infer model=FOLDER "who wrote …?"`.

Without a question, questions are read from standard input, one a line. Other settings are keys of configs/base.yaml.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.markup import escape

from search_r1.compose import compose_config
from search_r1.config import Config
from search_r1.errors import ConfigError, SearchR1Error
from search_r1.evaluate import SHORT, expand
from search_r1.prompts import normalize_question, prompt_messages
from search_r1.rollout.blocking import end_process
from search_r1.types import Prompt, Question, Trajectory


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 after one sentence about what is wrong, or 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="search_r1.infer",
        description=__doc__,
        epilog=f"Short names: {', '.join(f'{k} ({v})' for k, v in SHORT.items() if k != 'data')}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--template", default="search_r1", help="prompt template (default: search_r1)")
    parser.add_argument("words", nargs="*", metavar="key=value | question")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    overrides = [word for word in options.words if "=" in word.split(" ")[0]]
    questions = [word for word in options.words if word not in overrides]
    console = Console()
    try:
        config = compose_config("eval", list(expand(overrides)))
        for trajectory in answers(config, questions or (line.strip() for line in sys.stdin), options.template):
            show(trajectory, console)
    except SearchR1Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def answers(config: Config, questions: Sequence[str] | Iterator[str], template: str) -> Iterator[Trajectory]:
    """One greedy trajectory a question, with the rollout code of training.

    Raises:
        SearchR1Error: no model, no retriever, or a template that does not exist.
    """
    from search_r1.backends.tokenizer import load_tokenizer
    from search_r1.trainer.build import build_engine, build_rollouts, check_inputs
    from search_r1.trainer.validation import validation_sampling

    if not config.model.path:
        raise ConfigError("model.path is not set: give model=FOLDER")
    check_inputs(config)
    with ExitStack() as stack:
        engine = build_engine(config)
        stack.callback(engine.close)
        rollouts = build_rollouts(config, engine, load_tokenizer(config.model.path, config.model.trust_remote_code))
        for number, text in enumerate(filter(None, questions)):
            messages = tuple(prompt_messages(template, text))
            question = Question(f"asked/{number}", "asked", normalize_question(text), messages, ())
            prompt = Prompt(question, 0, rollouts.encode_prompt(question))
            yield rollouts.manager.run_llm_loop([prompt], validation_sampling(config, number))[0]


def show(trajectory: Trajectory, console: Console) -> None:
    """Sampled text plain, observations dim, the answer last."""
    console.rule(escape(trajectory.prompt.question.text))
    for turn in trajectory.turns:
        console.print(escape(turn.completion.text), highlight=False)
        if turn.observation is not None:
            console.print(f"[dim]{escape(turn.observation.text.strip())}[/dim]", highlight=False)
    console.print(f"[bold]answer:[/bold] {escape(trajectory.answer or 'none')} ({trajectory.status})")


if __name__ == "__main__":
    end_process(main())
