"""Rewards: pure functions of a trajectory, chosen by name."""

from search_r1.rewards.functions import metrics_of
from search_r1.rewards.registry import REWARDS, resolve_reward, score

__all__ = ["REWARDS", "metrics_of", "resolve_reward", "score"]
