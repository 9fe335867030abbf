"""Builds what the tool example needs from one seed: `python -m examples.tools.build [--output FOLDER]`.

Takes seconds: a corpus of invented bridges, training and test questions of four kinds, demonstrations, and an untrained
model with its tokenizer. Questions are drawn independently, so that some openings are asked twice. Some demonstrations
guess instead of calling a tool: that is what reinforcement learning is to unlearn.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.quickstart.tokenizer import CHAT_TEMPLATE, END, PAD, START
from examples.tools.functions import calculator, days_between
from retriever_server.bm25 import BM25Retriever
from retriever_server.corpus import Corpus
from search_r1.backends.model import save_causal_lm
from search_r1.environments.passages import passage_line
from search_r1.environments.search_tool import search_tool
from search_r1.environments.tools import json_body, tool_response
from search_r1.prompts import prompt_messages, with_tool_prompt
from search_r1.types import Passage

SEED = 7
TOP_K = 2
NUM_BRIDGES = 240
BRIDGES_PER_WORLD, DEMONSTRATIONS_PER_WORLD = 120, 200
NUM_TRAIN, NUM_TEST, NUM_DEMONSTRATIONS = 400, 200, 12_000
KINDS = ("arithmetic", "dates", "opening", "openings")
GUESSES: Mapping[str, float] = {"arithmetic": 0.55, "dates": 0.1, "opening": 0.1, "openings": 0.55}
"""How often a demonstration of a kind answers without any call."""
TEMPLATE = "short"
_WORDS = """
Amber Anchor Bell Broken Candle Clock Compass Copper Crimson Distant Dragon Eagle Emerald Falcon Feather
Frozen Garden Golden Harbor Hidden Hollow Iron Island Ivory Jade Jester King Ladder Lantern Lonely Marble
Meadow Mirror Needle Northern Ocean Old Orchard Pale Patient Pilgrim Queen Quiet River Road Rusted Scarlet
Shadow Silent Silver Tender Tower Union Upper Velvet Violin Willow Winter Young
"""
_PIECES = Regex(r"</?[a-z_]+>|[A-Za-z_]+ ?|[0-9]{1,2}|(?: ?[^\sA-Za-z0-9<])+ ?|\s+|<")
"""Words with the space behind them, and two digits at a time: what is copied keeps its tokens wherever it stands."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question, its answer, and the calls that lead to it, one list a turn."""

    kind: str
    question: str
    answer: str
    turns: list[list[tuple[str, dict[str, Any]]]]


class Bridges:
    """Invented bridges with the day they were opened, and what a search for them finds."""

    def __init__(self, rng: random.Random, count: int, taken: Collection[str] = ()) -> None:
        names = [f"{first} {second} Bridge" for first, second in combinations(_WORDS.split(), 2)]
        free = [name for name in names if name not in taken]
        self.opened = {name: _day(rng) for name in rng.sample(free, count)}
        self.passages = [(name, self._describe(rng, name, day)) for name, day in self.opened.items()]

    @staticmethod
    def _describe(rng: random.Random, name: str, day: date) -> str:
        length = f"It is {rng.randrange(40, 900)} metres long."
        opened = rng.choice((f"The {name} was opened on {day}.", f"It was on {day} that the {name} was opened."))
        return f"{opened} {length}"


def make_task(rng: random.Random, kind: str, bridges: Mapping[str, date]) -> Task:
    if kind == "arithmetic":
        text = _expression(rng)
        return Task(kind, f"What is {text}?", calculator(text), [[("calculator", {"expression": text})]])
    if kind == "dates":
        start, end = _day(rng), _day(rng)
        call = ("days_between", {"start": str(start), "end": str(end)})
        question = f"How many days lie between {start} and {end}?"
        return Task(kind, question, str(days_between(start, end)), [[call]])
    one, two = rng.sample(sorted(bridges), 2)
    if kind == "opening":
        return Task(kind, f"When was the {one} opened?", str(bridges[one]), [[("search", {"query": one})]])
    searches: list[tuple[str, dict[str, Any]]] = [("search", {"query": name}) for name in (one, two)]
    count = ("days_between", {"start": str(bridges[one]), "end": str(bridges[two])})
    answer = str(days_between(bridges[one], bridges[two]))
    question = f"How many days lie between the openings of the {one} and the {two}?"
    return Task(kind, question, answer, [searches, [count]])


Run = Callable[[str, dict[str, Any]], str]
"""Runs a call, name and arguments, as the tools of a rollout would."""


def guess(rng: random.Random, task: Task) -> list[dict[str, str]]:
    """A demonstration without any call."""
    answer = str(_day(rng)) if task.kind == "opening" else str(rng.randrange(10_000))
    return [{"role": "assistant", "content": f"\\boxed{{{answer}}}"}]


def demonstrate(task: Task, run: Run) -> list[dict[str, str]]:
    """Assistant turns and tool responses, as a rollout writes them."""
    messages = []
    for calls in task.turns:
        inner = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        results = [json_body(run(name, arguments)) for name, arguments in calls]
        responses = [tool_response(call, "success", result) for call, result in zip(inner, results, strict=True)]
        turn = "\n".join(f"<tool_call>{call}</tool_call>" for call in inner)
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "\n".join(responses)}]
    return [*messages, {"role": "assistant", "content": f"\\boxed{{{task.answer}}}"}]


def build(output: Path, num_demonstrations: int = NUM_DEMONSTRATIONS) -> None:
    """Write everything into `output`."""
    rng = random.Random(SEED)
    bridges = Bridges(rng, NUM_BRIDGES)
    names = list(bridges.opened)
    output.mkdir(parents=True, exist_ok=True)
    write_corpus(output / "corpus.jsonl", bridges)
    halves = (names[: NUM_BRIDGES // 2], names[NUM_BRIDGES // 2 :])
    for split, part, count in zip(("train", "test"), halves, (NUM_TRAIN, NUM_TEST), strict=True):
        opened = {name: bridges.opened[name] for name in part}
        tasks = [make_task(rng, KINDS[i % len(KINDS)], opened) for i in range(count)]
        write_questions(output / f"{split}.parquet", tasks, split)
    rows = make_demonstrations(rng, output / "demonstration_corpus.jsonl", bridges.opened, num_demonstrations)
    held_out = max(1, len(rows) // 30)
    write_json_lines(output / "demonstrations.jsonl", rows[held_out:])
    write_json_lines(output / "demonstrations_val.jsonl", rows[:held_out])
    tokenizer = train_tokenizer(rows)
    tokenizer.save_pretrained(output / "untrained")
    model = untrained_model(tokenizer)
    save_causal_lm(model, model.state_dict(), str(output / "untrained"))


def make_demonstrations(
    rng: random.Random, corpus: Path, forbidden: Collection[str], count: int
) -> list[dict[str, Any]]:
    """Rows with `messages`, the four kinds in turn. Days come from many small worlds: a model cannot memorise them."""
    rows = []
    for start in range(0, count, DEMONSTRATIONS_PER_WORLD):
        world = Bridges(rng, BRIDGES_PER_WORLD, forbidden)
        write_corpus(corpus, world)
        run = make_runner(world, corpus)
        for i in range(start, min(start + DEMONSTRATIONS_PER_WORLD, count)):
            task = make_task(rng, KINDS[i % len(KINDS)], world.opened)
            guessed = rng.random() < GUESSES[task.kind]
            rows.append(demonstration_row(task, guess(rng, task) if guessed else demonstrate(task, run)))
            rows.append(echo_row(rng, list(world.opened)))
    return rows


def write_corpus(file: Path, bridges: Bridges) -> None:
    rows = [{"id": str(i), "contents": f"{title}\n{text}"} for i, (title, text) in enumerate(bridges.passages)]
    write_json_lines(file, rows)


def demonstration_row(task: Task, turns: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The whole conversation, with the prompt of a rollout whose chat template has no place for tools."""
    schemas = [tool.schema for tool in (search_tool(_Nothing(), TOP_K, 100), calculator, days_between)]
    return {"messages": [*with_tool_prompt(prompt_messages(TEMPLATE, task.question), schemas), *turns]}


def echo_row(rng: random.Random, names: Sequence[str]) -> dict[str, Any]:
    """Things said again: a model that starts from random weights learns to copy from these."""
    kinds = (
        lambda: rng.choice(names),
        lambda: str(_day(rng)),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 7))),
        lambda: _expression(rng),
    )
    said = ", ".join(rng.choice(kinds)() for _ in range(rng.randrange(4, 12)))
    return {"messages": [{"role": "user", "content": f"Say {said}"}, {"role": "assistant", "content": said}]}


class _Nothing:
    """Only the schema of search is wanted."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [[] for _ in queries]


def make_runner(bridges: Bridges, corpus: Path) -> Run:
    """A runner over the corpus."""
    retriever = BM25Retriever.build(Corpus.open(corpus))

    def run(name: str, arguments: dict[str, Any]) -> str:
        if name == "search":
            found = [Passage(*bridges.passages[row]) for row, _ in retriever.rank(arguments["query"], TOP_K)]
            return "\n".join(passage_line(rank, passage) for rank, passage in enumerate(found, start=1))
        tool = {"calculator": calculator, "days_between": days_between}[name]
        return str(tool(**tool.bind(arguments)))

    return run


def train_tokenizer(rows: Sequence[Mapping[str, Any]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of words and pairs of digits, with the chat markers as its only special tokens.

    Each line of the tool prompt, which is the same in every row, is one token: a small model has no time to read it.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_PIECES, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{message['role']}\n{message['content']}" for row in rows for message in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(rows[0]["messages"][0]["content"].splitlines())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def untrained_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, num_layers: int = 4
) -> LlamaForCausalLM:
    """One million parameters, random. A Llama: a Qwen2 folder's tokenizer is loaded with its own splitting."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def write_questions(file: Path, tasks: Sequence[Task], split: str) -> None:
    """Parquet in the schema that training reads; `tools` names what each row may call."""
    rows = [
        {
            "id": f"{task.kind}/{split}/{index}",
            "question": task.question,
            "data_source": task.kind,
            "prompt": list(prompt_messages(TEMPLATE, task.question)),
            "reward_model": {"style": "rule", "ground_truth": {"target": [task.answer]}},
            "tools": ["search", "calculator", "days_between"],
            "extra_info": {"split": split, "index": index},
        }
        for index, task in enumerate(tasks)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def _expression(rng: random.Random) -> str:
    a, b, c = (rng.randrange(2, 100) for _ in range(3))
    return rng.choice((f"{a} * {b}", f"{a} + {b}", f"{a} - {b}", f"({a} + {b}) * {c}", f"{a} * {b} - {c}"))


def _day(rng: random.Random) -> date:
    return date(1850, 1, 1) + timedelta(days=rng.randrange(60_000))


def write_json_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/tools"))
    output = parser.parse_args().output
    build(output)
    sys.stderr.write(f"wrote {output}\n")


if __name__ == "__main__":
    main()
