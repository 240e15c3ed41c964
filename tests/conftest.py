"""What every test may rely on."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A red run must mean the change that it ran on: the same examples each time.  `make test-search` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=3_000, deadline=None)
settings.load_profile(os.environ.get("RAILSCOPE_TEST_EXAMPLES", "repeatable"))

# What was started in the background, as by nohup or some CI, ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line sets up logging for a process of its own: the next test must not meet it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
