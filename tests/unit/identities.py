"""Other ends of communicators than those of the tests' usual records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from railscope.agent.facts.snapshot import CommunicatorFacts
from railscope.agent.recording.recording import RecordedCommunicator

Told = TypeVar("Told", CommunicatorFacts, RecordedCommunicator)


def named(told: Told, **changed: Any) -> Told:
    """What is told of an end, with other facts of its identity."""
    return replace(told, identity=replace(told.identity, **changed))
