"""From YAML files and command-line overrides to a `Config`: the only place that sees Hydra and OmegaConf."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from search_r1.config import Config
from search_r1.config_checks import check
from search_r1.errors import ConfigError
from search_r1.legacy_keys import translate
from search_r1.redaction import redact, shown

logger = logging.getLogger(__name__)
CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
ConfigT = TypeVar("ConfigT")


def compose_config(config_name: str, overrides: Sequence[str]) -> Config:
    """The checked configuration; warnings are logged.

    Raises:
        ConfigError: unknown key (with the nearest one), wrong type or value, broken cross-key rule.
    """
    config = build_config(Config, compose_dict(config_name, overrides))
    for warning in check(config):
        logger.warning("%s", warning)
    return config


def compose_dict(config_name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Hydra's composition of configs/`config_name`.yaml and the overrides, as plain containers."""
    translated, notes = translate(overrides)
    for note in notes:
        logger.warning("%s", shown(note))
    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = hydra.compose(config_name, [_appendable(o) for o in translated])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, config_name)) from error
    return OmegaConf.to_container(composed, resolve=True)  # type: ignore[return-value]


def build_config(schema: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Validate plain containers against a dataclass; the message names every wrong key and the nearest right one."""
    try:
        return TypeAdapter(schema).validate_python(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(e, schema) for e in error.errors())) from error


def _appendable(override: str) -> str:
    """Hydra refuses unknown keys with a message of its own; `++` lets them through to our schema, which suggests."""
    key, separator, _ = override.partition("=")
    is_group = (CONFIG_DIR / key).is_dir()
    return f"++{override}" if separator and not is_group and not override.startswith(("+", "~", "hydra")) else override


def _sentence(error: Mapping[str, Any], schema: type) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown key {key}{suggest(key, known_keys(schema))}"
    return f"{key}={redact(error['input'], key)!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a nested dataclass."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        if is_dataclass(hints[field.name]):
            yield from known_keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def suggest(word: str, known: Iterator[str] | Sequence[str]) -> str:
    """ ", did you mean x?" or nothing."""
    candidates = list(known)
    matches = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    if not matches:
        last = {k.rsplit(".", 1)[-1]: k for k in candidates}
        matches = [last[m] for m in difflib.get_close_matches(word.rsplit(".", 1)[-1], last, n=1, cutoff=0.7)]
    return f", did you mean {matches[0]}?" if matches else ""


def _explain(error: Exception, config_name: str) -> str:
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = f"{suggest(name, error.options)} (there are {', '.join(sorted(error.options))})"
        return f"{group}={name}: there is no such file in configs/{group}{options}"
    if "Cannot find primary config" in str(error):
        available = sorted(p.stem for p in CONFIG_DIR.glob("*.yaml"))
        return f"there is no configs/{config_name}.yaml (there are {', '.join(available)})"
    return " ".join(line.strip() for line in str(error).splitlines()[:3])


def to_yaml(config: Config | Mapping[str, Any]) -> str:
    """The resolved configuration as YAML."""
    values = asdict(config) if isinstance(config, Config) else config
    return OmegaConf.to_yaml(OmegaConf.create(_plain(values)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def load_yaml(path: Path) -> Any:
    """A YAML file as plain containers.

    Raises:
        ConfigError: missing or not YAML.
    """
    try:
        loaded = OmegaConf.load(path)
    except (OSError, OmegaConfBaseException, Exception) as error:
        raise ConfigError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return OmegaConf.to_container(loaded, resolve=True) if isinstance(loaded, DictConfig) else loaded
