"""Whether Lucene can run here."""

from __future__ import annotations

import pytest

from retriever_server.errors import StartError
from retriever_server.lucene import find_jar, find_java


def _what_is_missing() -> str | None:
    try:
        find_java()
        find_jar()
    except StartError as error:
        return str(error)
    return None


missing = _what_is_missing()
needs_lucene = pytest.mark.skipif(missing is not None, reason=missing or "")
