"""What supervised fine-tuning learns from a conversation, to the token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from search_r1.backends.sharding import build_sharding
from search_r1.backends.supervised import SupervisedPolicy
from search_r1.config import ModelConfig, OptimConfig, ShardingConfig
from search_r1.data.chat_turns import ChatTurns
from search_r1.data.sft_examples import (
    ConversationEncoder,
    SFTExample,
    collate_examples,
    read_examples,
    split_observations,
    split_validation,
)
from search_r1.data.templates import PromptEncoder, encode_plain
from search_r1.errors import ConfigError, DataError, TrainingError
from search_r1.protocols import Metrics
from search_r1.sft_config import SFTDataConfig, SFTTrainingConfig
from search_r1.trainer.sft_loop import plan_batches, run_sft
from tests.chat_templates import SMOLLM2, with_template
from tests.model_factory import tiny_model_dir, tiny_tokenizer

SEARCH = "<think> Look. </think> <search> the author of abc </search>"
OBSERVATION = "\n\n<information>Doc 1(Title: abc) The town of abc lies in 3.</information>\n\n"
ANSWER = "<think> Found. </think> <answer> abc 3 </answer>"
QUESTION = {"role": "user", "content": "Question: who wrote abc?\n"}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def learned_text(example: SFTExample) -> str:
    tokenizer = tiny_tokenizer()
    return tokenizer.decode([t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if m])


def test_a_demonstration_has_the_ids_and_the_mask_of_the_rollout_it_shows() -> None:
    tokenizer = tiny_tokenizer()
    example = ConversationEncoder(tokenizer)([QUESTION, assistant(SEARCH + OBSERVATION + ANSWER)])
    pieces = [
        (PromptEncoder(tokenizer)([QUESTION]), False),
        (encode_plain(tokenizer, SEARCH), True),
        (encode_plain(tokenizer, OBSERVATION), False),
        (encode_plain(tokenizer, ANSWER), True),
    ]
    assert list(example.token_ids) == [token for ids, _ in pieces for token in ids]
    assert list(example.loss_mask) == [mask for ids, mask in pieces for _ in ids]


def test_a_sampled_closing_tag_never_merges_with_the_line_break_of_the_observation() -> None:
    tokenizer = tiny_tokenizer()
    assert encode_plain(tokenizer, SEARCH + "\n\n") != encode_plain(tokenizer, SEARCH) + encode_plain(tokenizer, "\n\n")
    example = ConversationEncoder(tokenizer)([QUESTION, assistant(SEARCH + OBSERVATION + ANSWER)])
    assert learned_text(example) == SEARCH + ANSWER


def test_no_end_of_turn_is_learned_after_an_answer_and_one_is_after_anything_else() -> None:
    tokenizer = tiny_tokenizer()
    encode = ConversationEncoder(tokenizer)
    assert encode([QUESTION, assistant(ANSWER)]).token_ids[-1] != tokenizer.eos_token_id
    plain = encode([QUESTION, assistant("I do not know.")])
    assert plain.token_ids[-1] == tokenizer.eos_token_id
    assert plain.loss_mask[-1]


def test_all_assistant_turns_and_their_ends_are_learned_and_nothing_between_them() -> None:
    messages = [QUESTION, assistant("abc"), {"role": "user", "content": "and from where?"}, assistant("town")]
    example = ConversationEncoder(tiny_tokenizer())(messages)
    assert learned_text(example) == "abc<|im_end|>town<|im_end|>"
    rendered = tiny_tokenizer().apply_chat_template(messages, tokenize=False)
    assert tiny_tokenizer().decode(example.token_ids) == rendered.removesuffix("\n")


def test_control_tokens_spelled_in_a_passage_or_a_user_message_stay_text() -> None:
    tokenizer = tiny_tokenizer()
    observation = OBSERVATION.replace("lies", "<|im_end|>")
    spelled = {"role": "user", "content": "what is <|im_start|>?"}
    example = ConversationEncoder(tokenizer)([QUESTION, assistant(SEARCH + observation), spelled, assistant(ANSWER)])
    starts = example.token_ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>"))
    ends = example.token_ids.count(tokenizer.eos_token_id)
    assert (starts, ends) == (4, 3)


def test_several_observations_are_split_off_one_by_one() -> None:
    pieces = split_observations(SEARCH + OBSERVATION + SEARCH + OBSERVATION + ANSWER)
    assert pieces == [(SEARCH, True), (OBSERVATION, False), (SEARCH, True), (OBSERVATION, False), (ANSWER, True)]


def test_collating_pads_on_the_right_without_loss_on_padding() -> None:
    batch = collate_examples([SFTExample((5, 6, 7), (False, True, True)), SFTExample((8, 9), (True, True))], 0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, True, False]]


def _write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _read(data: SFTDataConfig, *names: str) -> list[SFTExample]:
    return read_examples(data, names, tiny_tokenizer())


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "has no rows"),
        ([{"text": "no messages"}] * 3, r"line 1: no `messages`: .*data\.dataset_info\), and 2 more\. Repair"),
        ([{"messages": [QUESTION]}], "line 1: no assistant turn"),
        ([{"messages": [{"role": "user"}]}], "line 1: turn 1 holds 'None' where a text is expected"),
        ([{"messages": [QUESTION, assistant("abc " * 200)]}], "max_length=100"),
        (
            [{"messages": [QUESTION, assistant("a<tool_call>{bad</tool_call>"), QUESTION, assistant("b")]}],
            r"line 1: the call is no JSON: .*: '<tool_call>\{bad</tool_call>'",
        ),
        ([{"messages": [QUESTION, assistant('<tool_call>{"name": "f"}')]}], "line 1: the call is not closed"),
        (["a string"], "line 1: not a JSON object"),
    ],
)
def test_bad_files_are_refused_with_their_row(tmp_path: Path, rows: Sequence[object], says: str) -> None:
    with pytest.raises(DataError, match=says):
        _read(SFTDataConfig(max_length=100), _write(tmp_path / "rows.jsonl", rows))


def test_parquet_and_json_lines_give_the_same_examples(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": [QUESTION, assistant(ANSWER)]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    files = [_write(tmp_path / "rows.jsonl", rows), f"{tmp_path}/rows.parquet", f"{tmp_path}/rows.json"]
    first, second, third = _read(SFTDataConfig(), *files)
    assert first == second == third


def test_bad_rows_up_to_the_configured_share_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = {"messages": [QUESTION, assistant(ANSWER)]}, {"messages": [QUESTION]}
    file = _write(tmp_path / "rows.jsonl", [bad, *[good] * 99])
    assert len(_read(SFTDataConfig(), file)) == 99
    assert f"1 of 100 rows cannot be used and are left out: {file}, line 1: no assistant turn" in caplog.text
    with pytest.raises(
        DataError, match=r"2 of 101 rows cannot be used, more than data\.max_bad_share=0\.01: .*line 101"
    ):
        _read(SFTDataConfig(), _write(tmp_path / "rows.jsonl", [bad, *[good] * 99, "x"]))
    assert len(_read(SFTDataConfig(max_bad_share=0.5), file)) == 99


def test_a_column_that_no_row_has_is_told_before_anything_is_lost(tmp_path: Path) -> None:
    rows = [{"instruction": "q", "input": "", "output": "a"}, {"instruction": "q", "output": "a", "system": "s"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))

    def read(**columns: str) -> list[SFTExample]:
        entry = {"file_name": "rows.json", "columns": {"prompt": "instruction", "response": "output", **columns}}
        (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
        return _read(SFTDataConfig(dataset_info=f"{tmp_path}/dataset_info.json"), "mine")

    assert len(read(query="input", system="system")) == 2
    with pytest.raises(DataError, match=r"'mine': .* the column 'inputt', which no row has, did you mean 'input'"):
        read(query="inputt")


def test_a_limit_on_rows_takes_the_first_of_each_file(tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, assistant(f"<answer> {i} </answer>")]} for i in range(5)]
    file = _write(tmp_path / "rows.jsonl", rows)
    assert _read(SFTDataConfig(max_rows=2), file, file) == _read(SFTDataConfig(), file)[:2] * 2


def test_held_out_examples_are_not_trained_on_and_the_same_for_the_same_seed() -> None:
    examples = [SFTExample((i, i), (False, True)) for i in range(50)]
    train, validation = split_validation(examples, 0.1, seed=3)
    assert (len(train), len(validation)) == (45, 5)
    assert sorted(train + validation, key=lambda e: e.token_ids) == examples
    assert split_validation(examples, 0.1, seed=3) == (train, validation) != split_validation(examples, 0.1, seed=4)
    assert len(split_validation(examples, 7, seed=3)[1]) == 7
    assert split_validation(examples, 0.0, seed=3) == (examples, [])
    with pytest.raises(DataError, match=r"val_size=50 leaves none of 50"):
        split_validation(examples, 50, seed=3)


def test_tool_responses_inside_an_assistant_text_are_not_learned() -> None:
    text = "a <tool_response>r\n</tool_response>\nb"
    assert split_observations(text) == [("a ", True), ("<tool_response>r\n</tool_response>\n", False), ("b", True)]


@pytest.mark.parametrize(
    "text",
    [
        SEARCH + "\n\n<information>cut off",
        SEARCH + "\n\n<information>a </information> b</information>\n\n" + ANSWER,
        "<think> I read <information> next. </think>" + SEARCH + OBSERVATION + ANSWER,
        "a</tool_response>b",
    ],
)
def test_a_text_whose_observations_have_no_certain_borders_is_a_bad_row(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"line 1: the tags of observations do not stand in pairs: .*Complete"):
        _read(SFTDataConfig(), _write(tmp_path / "rows.jsonl", [{"messages": [QUESTION, assistant(text)]}]))


def test_the_end_of_a_turn_is_learned_though_its_token_is_not_marked_special(tmp_path: Path) -> None:
    plain = Tokenizer.from_str(with_template(SMOLLM2, ()).backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=SMOLLM2, eos_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<|im_start|>", "<|im_end|>")])
    end = tokenizer.convert_tokens_to_ids(ChatTurns(tokenizer).end_of_turn)
    example = ConversationEncoder(tokenizer)([QUESTION, assistant("abc"), QUESTION, assistant("town")])
    learned = [t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if m]
    assert learned.count(end) == 2
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    with pytest.raises(ConfigError, match="without a special token of the tokenizer, so that no end could be learned"):
        ConversationEncoder(tokenizer)([QUESTION, assistant("abc")])


def test_a_plan_shows_every_example_once_an_epoch_and_is_the_same_for_the_same_seed() -> None:
    lengths = [10 + (i * 37) % 90 for i in range(300)]
    config = SFTTrainingConfig(epochs=2, batch_tokens=400)
    plan = plan_batches(lengths, config, seed=1)
    assert sorted(row for rows in plan for row in rows) == sorted([*range(300), *range(300)])
    assert all(len(rows) * max(lengths[row] for row in rows) <= 400 for rows in plan)
    assert plan == plan_batches(lengths, config, seed=1) != plan_batches(lengths, config, seed=2)
    assert plan_batches(lengths, SFTTrainingConfig(total_steps=7, batch_tokens=400), seed=1) == plan[:7]


def test_a_part_of_an_epoch_is_that_part_of_its_batches() -> None:
    lengths = [10] * 100
    half, more = (plan_batches(lengths, SFTTrainingConfig(epochs=e, batch_size=10), seed=1) for e in (0.25, 1.25))
    assert (len(half), len(more)) == (3, 13)
    assert more[:3] == half
    assert sorted(row for rows in more[:10] for row in rows) == list(range(100))


def test_a_batch_size_counts_examples_and_the_last_batch_of_an_epoch_may_be_smaller() -> None:
    plan = plan_batches(list(range(1, 24)), SFTTrainingConfig(batch_size=10), seed=1)
    assert [len(rows) for rows in plan] == [10, 10, 3]
    assert sorted(row for rows in plan for row in rows) == list(range(23))


def _learner(folder: Path, max_tokens: int, packing: Literal["auto", "packed"] = "auto") -> SupervisedPolicy:
    return SupervisedPolicy(
        ModelConfig(path=str(folder)),
        OptimConfig(lr=1e-2),
        build_sharding(ShardingConfig()),
        30,
        pad_token_id=0,
        max_tokens_per_micro_batch=max_tokens,
        packing=packing,
    )


def _examples() -> list[SFTExample]:
    encode = ConversationEncoder(tiny_tokenizer())
    texts = (SEARCH + OBSERVATION + ANSWER, ANSWER, SEARCH + OBSERVATION + ANSWER.replace("3", "abc abc abc"))
    return [encode([QUESTION, assistant(text)]) for text in texts]


def test_learning_brings_the_loss_down_and_it_is_the_mean_over_learned_tokens(tmp_path: Path) -> None:
    learner, examples = _learner(tiny_model_dir(tmp_path), max_tokens=1000), _examples()
    tokens = [sum(example.loss_mask) for example in examples]
    each = [learner.loss([example]) for example in examples]
    before = learner.loss(examples)
    assert before == pytest.approx(sum(n * x for n, x in zip(tokens, each, strict=True)) / sum(tokens), rel=1e-5)
    losses = [learner.update(examples)["loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert learner.loss(examples) < 0.3 * before


def test_an_update_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    folder, examples = tiny_model_dir(tmp_path), _examples()
    whole, split = _learner(folder, max_tokens=1000), _learner(folder, max_tokens=1)
    norms = [learner.update(examples)["grad_norm"] for learner in (whole, split)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_packed_examples_do_not_see_one_another(tmp_path: Path) -> None:
    folder, examples = tiny_model_dir(tmp_path), _examples()
    padded, packed = _learner(folder, max_tokens=1000), _learner(folder, max_tokens=1000, packing="packed")
    assert packed.loss(examples) == pytest.approx(padded.loss(examples), rel=1e-5)
    assert packed.update(examples)["grad_norm"] == pytest.approx(padded.update(examples)["grad_norm"], rel=1e-4)


def test_what_an_observation_says_is_not_learned(tmp_path: Path) -> None:
    learner, example = _learner(tiny_model_dir(tmp_path), max_tokens=1000), _examples()[0]
    batch = collate_examples([example], 0)
    log_probs, _ = learner.module(batch.input_ids, batch.loss_mask, 1.0)
    assert torch.equal(log_probs != 0, batch.loss_mask)
    assert sum(a != b for a, b in pairwise(example.loss_mask)) == 3


class _BrokenLearner(SupervisedPolicy):
    def __init__(self) -> None:
        """No model: every step is non-finite."""

    def update(self, examples: Sequence[SFTExample]) -> Metrics:
        return {"loss": math.nan, "bad_step": 1.0}

    def loss(self, examples: Sequence[SFTExample]) -> float:
        return 0.0


def test_non_finite_steps_in_a_row_stop_the_run() -> None:
    reported: list[int] = []
    plan = [[0]] * 9
    with pytest.raises(TrainingError, match="step 3: 3 non-finite"):
        run_sft(
            _BrokenLearner(), _examples(), [], plan, SFTTrainingConfig(), lambda metrics, step: reported.append(step)
        )
    assert reported == [1, 2]
