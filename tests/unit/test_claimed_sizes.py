"""Sizes of communicators in a recording are what processes claimed: looking for missing ranks takes bounded time."""

from __future__ import annotations

import time

from railscope.agent.cluster.fleet.facts import Rank
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.imports.recording_hang import ranks_without_recording


def rank(comm: int, nranks: int) -> Rank:
    return Rank(rank_identity_from_labels(f"{comm:016x}", "0", {"nranks": str(nranks)}, ()), host="h")


def test_thousands_of_communicators_that_claim_a_million_ranks_take_no_hours() -> None:
    began = time.monotonic()
    found = list(ranks_without_recording([rank(comm, 600_000) for comm in range(2000)]))
    assert time.monotonic() - began < 60
    assert len(found) == 2
    assert "not known" in found[-1]


def test_ranks_without_recording_are_named_as_ever() -> None:
    assert list(ranks_without_recording([rank(1, 3)])) == ["no recording of ranks 1-2 of 0000000000000001"]
