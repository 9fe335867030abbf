"""Loading a tokenizer, with a sentence when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_r1.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""One of them holds the vocabulary; without any, a tokenizer of control tokens alone would be made."""


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face folder or hub name.

    A tokenizer without a pad token gets its end-of-text token as one, for batching only: masks are recorded, never
    read from pad ids.

    Raises:
        ConfigError: no folder, no tokenizer in it, or a hub that cannot be reached.
    """
    folder = Path(path)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(
                f"model.path={path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy the tokenizer "
                "files of the model it comes from into the folder"
            )
    elif folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path={path}: there is no such folder")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"model.path={path}: no tokenizer can be loaded from there ({reason})") from error
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ConfigError(f"model.path={path}: its tokenizer knows no letters: are its vocabulary files missing?")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
