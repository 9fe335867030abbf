"""Secrets kept out of what is written or shown: config files, messages, logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<redacted>"
_NAME = r"(?:key|token|secret|password|credential)s?"
_SECRET = re.compile(rf"{_NAME}$", re.IGNORECASE)
_USERINFO = re.compile(r"(\w://)[^/\s]*@|^[^/\s:]+:[^/\s]*@")
_PARAMETER = re.compile(rf"([?&;][^=&;#\s]*{_NAME}=)[^&;#\s]*", re.IGNORECASE)


def shown(text: str) -> str:
    """A URL, or a text with URLs, without user names, passwords and the values of secret query parameters.

    A password may hold an `@`: all up to the last one before the path is hidden.

    >>> shown("http://me:p@ss@host:8000/retrieve?api_key=K&lang=en")
    'http://<redacted>@host:8000/retrieve?api_key=<redacted>&lang=en'
    """
    text = _USERINFO.sub(lambda match: f"{match[1] or ''}{HIDDEN}@", text)
    return _PARAMETER.sub(rf"\1{HIDDEN}", text)


def redact(value: Any, key: str = "") -> Any:
    """Plain containers with secrets replaced: values under keys that name one, and those inside URLs.

    >>> redact({"api_key": "abc", "url": "http://me:pw@host/retrieve"})
    {'api_key': '<redacted>', 'url': 'http://<redacted>@host/retrieve'}
    """
    if isinstance(value, Mapping):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v, key) for v in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _SECRET.search(key) else shown(value)
