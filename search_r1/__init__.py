"""Search-R1, standalone: train language models by reinforcement learning to answer questions by searching."""

__version__ = "0.1.0"
