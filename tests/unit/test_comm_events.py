"""Events and errors of communicators, as the agent counts them, and where a build keeps their result (simulated)."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.collectives.events import CommError, CommEvents, error_name
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.records import errors as error_records
from railscope.probes.nccl.records.calls import LIFECYCLE_EVENT, NO_OFFSET, LifecycleKind
from railscope.probes.nccl.records.errors import (
    ERROR_EVENT,
    ErrorSource,
    ErrorStat,
    Result,
    error_layout,
    stored_result,
)
from tests.nccl.library import REPOSITORY
from tests.unit.headers import compare, constants, enumeration

HEADER = (REPOSITORY / "probes/bpf/errors.h").read_text()
EVENTS = {
    *("init", "split", "shrink", "grow", "finalize", "destroy", "abort", "revoke", "suspend", "resume"),
    "device_comm",
}
ERRORS = {
    *("unhandled_cuda_error", "system_error", "internal_error", "invalid_argument", "invalid_usage"),
    *("remote_error", "timeout"),
}
REMOTE, SYSTEM = int(Result.REMOTE_ERROR), int(Result.SYSTEM_ERROR)


def lifecycle(kind: LifecycleKind, result: int = 0, instance: int = 1, time_ns: int = 10) -> Records:
    event = np.zeros(1, LIFECYCLE_EVENT)
    event["kind"], event["result"], event["instance"], event["time_ns"] = kind, result, instance, time_ns
    return event


def met(result: int, source: ErrorSource = ErrorSource.ASYNC, instance: int = 1, time_ns: int = 20) -> Records:
    event = np.zeros(1, ERROR_EVENT)
    event["result"], event["source"], event["instance"], event["time_ns"] = result, source, instance, time_ns
    return event


def counted(events: CommEvents) -> dict[str, int]:
    return {name: count for name, count in {**events.events(), **events.errors()}.items() if count}


def test_every_label_is_there_with_zero_before_anything_happens() -> None:
    events = CommEvents()
    assert dict(events.events()) == dict.fromkeys(EVENTS, 0)
    assert dict(events.errors()) == dict.fromkeys(ERRORS, 0)


def test_each_kind_of_call_counts_under_its_name_and_sightings_do_not() -> None:
    events = CommEvents()
    for kind in LifecycleKind:
        events.record_lifecycle(lifecycle(kind))
    assert dict(events.events()) == {**dict.fromkeys(EVENTS, 1), "init": 2}  # init and init-all
    assert dict(events.errors()) == dict.fromkeys(ERRORS, 0)


def test_a_non_blocking_init_in_progress_is_an_init_and_no_error() -> None:
    events = CommEvents()
    events.record_lifecycle(lifecycle(LifecycleKind.INIT, Result.IN_PROGRESS))
    assert counted(events) == {"init": 1}


def test_a_failed_init_is_an_error_and_no_init() -> None:
    events = CommEvents()
    events.record_lifecycle(lifecycle(LifecycleKind.INIT, Result.UNHANDLED_CUDA_ERROR, instance=0))
    events.record_lifecycle(lifecycle(LifecycleKind.INIT_ALL, SYSTEM, instance=4, time_ns=33))
    assert counted(events) == {"unhandled_cuda_error": 1, "system_error": 1}
    assert events.last_error(4) == CommError("system_error", 33, "init")
    assert events.last_error(0) is None


def test_an_error_met_at_every_call_and_every_reading_counts_once() -> None:
    events = CommEvents()
    events.record_stored_error(1, REMOTE, 15)
    events.record_errors(met(REMOTE, time_ns=20))
    events.record_stored_error(1, Result.SUCCESS, 22)  # not every place where NCCL looks can be read
    events.record_stored_error(1, REMOTE, 25)
    assert counted(events) == {"remote_error": 1}
    assert events.last_error(1) == CommError("remote_error", 15, "async")


def test_another_error_and_the_first_one_after_it_count_again() -> None:
    events = CommEvents()
    for result in (REMOTE, SYSTEM, Result.SUCCESS, SYSTEM, Result.IN_PROGRESS, REMOTE):
        events.record_errors(met(int(result)))
    assert counted(events) == {"remote_error": 2, "system_error": 1}


def test_two_communicators_with_the_same_error_count_twice() -> None:
    events = CommEvents()
    events.record_errors(np.concatenate([met(REMOTE, instance=1), met(REMOTE, instance=2), met(REMOTE, instance=0)]))
    assert counted(events) == {"remote_error": 3}


def test_errors_of_communicators_that_nobody_knows_are_not_taken_for_one() -> None:
    events = CommEvents()
    for _ in range(2):
        events.record_errors(met(REMOTE, instance=0))
    assert counted(events) == {"remote_error": 2}
    assert events.last_error(0) is None


def test_a_failed_call_is_told_apart_from_the_error_that_led_to_it() -> None:
    events = CommEvents()
    events.record_errors(met(REMOTE, time_ns=20))
    events.record_errors(met(Result.INTERNAL_ERROR, ErrorSource.DESTROY, time_ns=30))
    assert counted(events) == {"remote_error": 1, "internal_error": 1}
    assert events.last_error(1) == CommError("internal_error", 30, "destroy")


def test_forgetting_a_communicator_keeps_what_it_counted() -> None:
    events = CommEvents()
    events.record_errors(met(REMOTE))
    events.forget([1, 7])
    assert events.last_error(1) is None
    assert counted(events) == {"remote_error": 1}


def test_results_of_later_versions_count_under_their_number_whatever_numbers_a_job_makes_up() -> None:
    events = CommEvents()
    assert (error_name(6), error_name(9), error_name(-1)) == ("remote_error", "result_9", "result_-1")
    for result in (*range(-5, 0), *range(32, 200)):
        events.record_errors(met(result))
    for result in range(12, 31):
        events.record_errors(met(result))
    errors = events.errors()
    assert errors["result_other"] == 173
    assert all(errors[f"result_{result}"] == 1 for result in range(12, 31))
    assert sum(errors.values()) == 173 + 19


@given(
    st.lists(
        st.one_of(
            st.builds(lifecycle, st.sampled_from(LifecycleKind), st.integers(-2, 12), st.integers(0, 2)),
            st.builds(met, st.integers(-2, 12), st.sampled_from(ErrorSource), st.integers(0, 2)),
        )
    )
)
def test_no_count_ever_falls_and_no_label_ever_leaves(records: list[Records]) -> None:
    events = CommEvents()
    before = {**events.events(), **events.errors()}
    for record in records:
        take = events.record_errors if record.dtype == ERROR_EVENT else events.record_lifecycle
        take(record)
        after = {**events.events(), **events.errors()}
        assert all(after[name] >= count for name, count in before.items())
        assert sum(after.values()) - sum(before.values()) in (0, 1)
        before = after


def test_the_header_and_the_records_agree() -> None:
    for name, (dtype, size_bytes) in error_records.SIZES.items():
        compare(HEADER, name, dtype, size_bytes)
    assert enumeration(HEADER, "error_stat") == [f"ERROR_STAT_{stat.name}" for stat in ErrorStat] + ["ERROR_STAT_COUNT"]
    assert constants(HEADER)["RESULT_IN_PROGRESS"] == Result.IN_PROGRESS
    for kind in LifecycleKind:
        if LifecycleKind.CONFIRMED < kind < LifecycleKind.CONNECT:  # those from there on return no error of their own
            assert ErrorSource(int(kind)).name == kind.name


COMM = Structure(64, {"startMagic": 0, "asyncResult": 8, "proxyState": 16})
STATE = Structure(32, {"asyncResult": 4})


@pytest.mark.parametrize(
    ("structures", "expected"),
    [
        ({"ncclComm": COMM, "ncclProxyState": STATE}, (1, 8, 16, 4)),
        ({"ncclComm": COMM}, (1, 8, NO_OFFSET, NO_OFFSET)),
        ({"ncclComm": COMM, "ncclProxyState": Structure(32, {})}, (1, 8, NO_OFFSET, NO_OFFSET)),
        ({"ncclComm": Structure(64, {"asyncResult": 8})}, None),
        ({"ncclComm": Structure(64, {})}, None),
        ({}, None),
    ],
)
def test_a_build_says_where_its_result_is_as_far_as_it_is_known(
    structures: dict[str, Structure], expected: tuple[int, ...] | None
) -> None:
    layout = error_layout(structures)
    assert (None if layout is None else layout.record().tolist()) == (None if expected is None else [expected])


class Memory(ctypes.Structure):
    """A communicator and its proxy's state, as `COMM` and `STATE` have them."""

    _fields_ = (
        *(("magic", ctypes.c_uint64), ("result", ctypes.c_int32), ("padding", ctypes.c_int32)),
        *(("state", ctypes.c_uint64), ("state_padding", ctypes.c_int32), ("state_result", ctypes.c_int32)),
    )


@pytest.mark.parametrize(
    ("own", "of_proxy", "expected"), [(0, 0, 0), (0, REMOTE, REMOTE), (SYSTEM, REMOTE, SYSTEM), (7, REMOTE, 7)]
)
def test_the_stored_result_is_the_communicators_own_before_its_proxys(own: int, of_proxy: int, expected: int) -> None:
    memory = Memory(magic=0x0280028002800280, result=own, state_result=of_proxy)
    comm = ctypes.addressof(memory)
    memory.state = comm + Memory.state_padding.offset
    with_state = error_layout({"ncclComm": COMM, "ncclProxyState": STATE})
    without = error_layout({"ncclComm": COMM})
    assert with_state is not None
    assert without is not None
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        assert stored_result(descriptor, comm, with_state) == expected
        assert stored_result(descriptor, comm, without) == own
        memory.state = 0
        assert stored_result(descriptor, comm, with_state) == own
        memory.magic = 0
        assert stored_result(descriptor, comm, with_state) is None
        assert stored_result(descriptor, 8, with_state) is None
    finally:
        os.close(descriptor)
