"""Settings for the whole suite."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A suite started in the background inherits an ignored SIGINT, and so would every process that its tests interrupt."""
