from __future__ import annotations

import pytest
import torch

from search_r1.data.collate import collate
from search_r1.types import Prompt, Status, Trajectory
from tests.fakes import EOS_ID, answer_turn, make_prompt, make_question, make_trajectory, search_turn


def test_a_batch_worked_by_hand() -> None:
    long = Trajectory(
        Prompt(make_question(), 7, (1, 2)), [3, 0, 4], [True, False, True], [-0.5, 0.0, -0.25], status=Status.ANSWERED
    )
    short = Trajectory(Prompt(make_question(), 9, (5,)), [0], [True], [-1.0], status=Status.OUT_OF_TURNS)
    batch = collate([long, short], [1.0, 0.5], pad_token_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 4], [5, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch.loss_mask.tolist() == [[False, False, True, False, True], [False, True, False, False, False]]
    assert batch.rollout_log_probs.tolist() == [[0, 0, -0.5, 0, -0.25], [0, -1.0, 0, 0, 0]]
    assert batch.rewards.tolist() == [1.0, 0.5]
    assert batch.group_ids.tolist() == [7, 9]
    assert (batch.input_ids.dtype, batch.group_ids.dtype) == (torch.int64, torch.int64)
    assert (batch.loss_mask.dtype, batch.attention_mask.dtype) == (torch.bool, torch.bool)
    assert (batch.rollout_log_probs.dtype, batch.rewards.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("pad_token_id", [0, EOS_ID, ord("<"), ord("e")])
def test_no_mask_depends_on_the_pad_id_even_when_it_stands_in_the_text(pad_token_id: int) -> None:
    trajectories = [
        make_trajectory([search_turn("q"), answer_turn("e")]),
        make_trajectory([answer_turn("<e>")], prompt=make_prompt("a longer prompt")),
    ]
    batch = collate(trajectories, [1.0, 0.0], pad_token_id)
    for row, trajectory in enumerate(trajectories):
        kept = batch.attention_mask[row]
        assert batch.input_ids[row][kept].tolist() == trajectory.context_ids
        assert batch.input_ids[row][batch.loss_mask[row]].tolist() == [
            token for token, sampled in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if sampled
        ]
    assert not (batch.loss_mask & ~batch.attention_mask).any()


def test_a_trajectory_without_a_sampled_token_is_a_row_without_a_loss() -> None:
    batch = collate([make_trajectory([], Status.OUT_OF_TOKENS), make_trajectory([answer_turn("a")])], [0.0, 1.0], 0)
    assert batch.loss_mask.sum(1).tolist() == [0, 18]


def test_a_void_trajectory_is_never_trained() -> None:
    with pytest.raises(AssertionError, match="1 VOID trajectories in a batch of 1: timeout"):
        collate([make_trajectory([], Status.VOID, failure="timeout")], [0.0], 0)


def test_rewards_are_one_a_trajectory() -> None:
    with pytest.raises(AssertionError, match="1 trajectories with 2 rewards"):
        collate([make_trajectory([answer_turn("a")])], [0.0, 1.0], 0)
