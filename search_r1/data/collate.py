"""From ragged trajectories to right-padded tensors: the one place where padding is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from search_r1.types import RolloutBatch, Status, Trajectory


def collate(trajectories: Sequence[Trajectory], rewards: Sequence[float], pad_token_id: int) -> RolloutBatch:
    """Scored trajectories as one batch, one row each in order; T is the length of the longest.

    VOID trajectories must have been dropped, and there must be at least one left. The pad id fills `input_ids` and
    means nothing: all masks come from lengths and from what was recorded while sampling.
    """
    void = [trajectory.failure for trajectory in trajectories if trajectory.status is Status.VOID]
    assert not void, f"{len(void)} VOID trajectories in a batch of {len(trajectories)}: {void[0]}"
    assert len(trajectories) == len(rewards) > 0, f"{len(trajectories)} trajectories with {len(rewards)} rewards"
    num_prompt_tokens = [len(trajectory.prompt.token_ids) for trajectory in trajectories]
    rows = list(zip(trajectories, num_prompt_tokens, strict=True))
    lengths = torch.tensor([n + len(trajectory.response_ids) for trajectory, n in rows])
    return RolloutBatch(
        input_ids=_padded([trajectory.context_ids for trajectory in trajectories], torch.int64, pad_token_id),
        attention_mask=torch.arange(int(lengths.max())) < lengths[:, None],
        loss_mask=_padded([[False] * n + trajectory.loss_mask for trajectory, n in rows], torch.bool, False),
        rollout_log_probs=_padded([[0.0] * n + trajectory.log_probs for trajectory, n in rows], torch.float32, 0.0),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor([trajectory.prompt.group_id for trajectory in trajectories], dtype=torch.int64),
    )


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float) -> torch.Tensor:
    """(B, T): the rows, right-padded."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=padding)
