"""Whether a communicator was seen from its first call on, and what is said where a call made none that is known.

The kernel's events are simulated.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest

from railscope.agent.node.collectives.communicators import Communicators
from railscope.agent.node.collectives.name_claims import NameClaims
from railscope.agent.node.collectives.rank_gpus import RankGpus
from railscope.probes.nccl.records.calls import COMMUNICATOR, COMMUNICATOR_KEY, LIFECYCLE_EVENT, LifecycleKind
from railscope.probes.nccl.records.errors import Result
from tests.unit.collectives_kernel import SimulatedTable


@pytest.mark.parametrize(
    ("kinds", "whole"),
    [
        ((LifecycleKind.INIT,), True),
        ((LifecycleKind.INIT, LifecycleKind.CONFIRMED), True),
        ((LifecycleKind.SPLIT,), True),
        ((LifecycleKind.SEEN,), False),
        ((LifecycleKind.SEEN, LifecycleKind.CONFIRMED), False),
        ((LifecycleKind.SEEN, LifecycleKind.DESTROY), False),
    ],
    ids=lambda value: "-".join(kind.name for kind in value) if isinstance(value, tuple) else str(value),
)
def test_only_what_was_seen_to_be_made_is_whole(kinds: tuple[LifecycleKind, ...], whole: bool) -> None:
    communicators = Communicators(
        SimulatedTable(COMMUNICATOR_KEY, COMMUNICATOR),
        lambda _tgid: "2.27.3",
        NameClaims(lambda _: None, lambda _: True),
        RankGpus(lambda _: True),
    )
    for kind in kinds:
        event = np.zeros(1, LIFECYCLE_EVENT)
        event["instance"], event["tgid"], event["kind"] = 7, 4711, kind
        communicators.record_events(event)
    known = communicators.get(7)
    assert known is not None
    assert known.whole is whole


@pytest.mark.parametrize(
    ("kind", "result", "comm", "said"),
    [
        (
            LifecycleKind.SPLIT,
            Result.SUCCESS,
            0,
            "ncclCommSplit returned no communicator: either the rank is in none of the new ones (NCCL_SPLIT_NOCOLOR), "
            "and nothing is missed, or its group has not ended, and the communicator will be known from its first call "
            "on",
        ),
        (
            LifecycleKind.SPLIT,
            Result.IN_PROGRESS,
            0,
            "ncclCommSplit has not returned its communicator yet, which will be known from its first call on",
        ),
        (
            LifecycleKind.SHRINK,
            Result.SUCCESS,
            0,
            "ncclCommShrink has not returned its communicator yet, which will be known from its first call on",
        ),
        (
            LifecycleKind.SPLIT,
            Result.INVALID_ARGUMENT,
            0,
            "ncclCommSplit failed with invalid_argument and created no communicator: the job's own log says why",
        ),
        (
            LifecycleKind.INIT,
            99,
            0,
            "ncclCommInitRank failed with result_99 and created no communicator: the job's own log says why",
        ),
        (
            LifecycleKind.INIT,
            Result.SUCCESS,
            0x7F00,
            "ncclCommInitRank created a communicator beyond the kernel table's limit: its calls count under an "
            "unknown communicator; raise --limit.communicators",
        ),
    ],
    ids=["without a colour", "split not done", "shrink not done", "split failed", "unknown error", "table full"],
)
def test_a_call_that_made_no_communicator_that_is_known_is_told_with_what_follows(
    kind: LifecycleKind, result: int, comm: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    communicators = Communicators(
        SimulatedTable(COMMUNICATOR_KEY, COMMUNICATOR),
        lambda _tgid: "2.27.3",
        NameClaims(lambda _: None, lambda _: True),
        RankGpus(lambda _: True),
    )
    event = np.zeros(1, LIFECYCLE_EVENT)
    event["tgid"], event["kind"], event["result"], event["comm"] = 4711, kind, result, comm
    with caplog.at_level(logging.INFO, "railscope.communicators"):
        communicators.record_events(event)
    assert caplog.messages == [f"process 4711: {said}"]
    assert list(communicators) == []


def test_what_a_process_does_thousands_of_times_is_told_once_and_of_each_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    communicators = Communicators(
        SimulatedTable(COMMUNICATOR_KEY, COMMUNICATOR),
        lambda _tgid: "2.27.3",
        NameClaims(lambda _: None, lambda _: True),
        RankGpus(lambda _: True),
    )
    events = np.zeros(1000, LIFECYCLE_EVENT)
    events["tgid"], events["kind"], events["comm"] = 4711, LifecycleKind.INIT, 0x7F00
    events["tgid"][-1] = 4712
    with caplog.at_level(logging.INFO, "railscope.communicators"):
        communicators.record_events(events)
        assert [message.split(":")[0] for message in caplog.messages] == ["process 4711", "process 4712"]
        communicators.end_process(4711, 1)
        communicators.record_events(events[:1])
    assert len(caplog.messages) == 3, "the number may be another process's by then"


def test_results_that_a_process_makes_up_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    communicators = Communicators(
        SimulatedTable(COMMUNICATOR_KEY, COMMUNICATOR),
        lambda _tgid: "2.27.3",
        NameClaims(lambda _: None, lambda _: True),
        RankGpus(lambda _: True),
    )
    events = np.zeros(1000, LIFECYCLE_EVENT)
    events["tgid"], events["kind"], events["result"] = 4711, LifecycleKind.INIT, np.arange(100, 1100)
    with caplog.at_level(logging.INFO, "railscope.communicators"):
        communicators.record_events(events)
    assert len(caplog.messages) == 16
