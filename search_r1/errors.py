"""Typed errors. A person's mistake is a `ConfigError`; the world failing is one of the others."""


class SearchR1Error(Exception):
    """Base of all errors this framework raises on purpose; its message is one clear sentence or two."""


class ConfigError(SearchR1Error):
    """A setting, a file or an argument is wrong. The message names the key, the value and the remedy."""


class DataError(ConfigError):
    """A data file is missing, empty or malformed. The message names the file and the row."""


class RetrieverError(SearchR1Error):
    """The retriever could not be had after bounded retries, or answered with something else than passages."""


class ToolUnavailableError(SearchR1Error):
    """For tools to raise when what they depend on is down, which is no fault of the model: the trajectory is VOID."""


class EngineError(SearchR1Error):
    """The rollout engine cannot sample: an impossible context, a dead process, a failed weight update."""


class EngineLostError(EngineError):
    """An engine died or gave no answer in time, and so did those tried instead: what waited for it is VOID."""


class VoidLimitError(SearchR1Error):
    """More trajectories of one step failed than `rollout.max_void_share` allows."""


class TrainingError(SearchR1Error):
    """Training cannot go on: non-finite losses in a row, or engine and trainer disagree."""
