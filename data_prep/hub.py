"""Question sets from Hugging Face, or from a local folder in a form that `datasets` reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_r1.errors import ConfigError, DataError

COLLECTION = "RUC-NLPIR/FlashRAG_datasets"
"""One configuration a source, all in the same form."""
SOURCES = (
    "nq", "hotpotqa", "triviaqa", "popqa", "2wikimultihopqa", "musique", "bamboogle", "web_questions", "strategyqa"
)  # fmt: skip


def check_source(source: str) -> None:
    """Raises `ConfigError`, with the nearest name, when the collection's configurations do not include `source`."""
    if source not in SOURCES:
        near = difflib.get_close_matches(source, SOURCES, n=1, cutoff=0)[0]
        raise ConfigError(
            f"--source {source} is not known on {COLLECTION}; did you mean {near}? ({', '.join(SOURCES)}); "
            "for your own data name its file with --input"
        )


def hub_rows(name: str, config: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows of one split of `name`: a hub dataset, a folder written by `save_to_disk`, or one of data files.

    `config` is the hub dataset's configuration; in a folder of data files, the folder inside it of that name, if any.

    Raises:
        DataError: no such dataset or split, or the hub cannot be reached and nothing is cached.
    """
    import datasets

    try:
        loaded = _from_folder(name, config, split) if Path(name).is_dir() else _load(name, config, split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"{name} ({config}, {split}) cannot be loaded: {reason}. Without a connection, download it elsewhere and "
            "name the file or folder with --input"
        ) from error
    yield from loaded


def _load(name: str, config: str | None, split: str) -> Any:
    import datasets

    return datasets.load_dataset(name, config, split=split)


def _from_folder(folder: str, config: str, split: str) -> Any:
    import datasets

    if (Path(folder) / "dataset_dict.json").is_file():
        return datasets.load_from_disk(folder)[split]
    if (Path(folder) / "state.json").is_file():
        return datasets.load_from_disk(folder)
    inner = Path(folder) / config
    return _load(str(inner if inner.is_dir() else folder), None, split)
