"""NCCL's own failover: the real library's function that handles a failed completion, called on a forged connection.

No port, no network and no second rank take part.  The connection has no queue pairs, so that nothing is there to be
moved; what NCCL decides, and notes as the state of the port, is its own doing.  Which bytes go where afterwards is
looked at where a connection sends: ncclIbMultiSend stands in, and does nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.functions.internals import Level, internal_points
from railscope.probes.nccl.layouts.layout import Layouts, Structure
from railscope.probes.nccl.memory.port_states import read_port_states
from railscope.probes.nccl.programs.failover import SYMBOL, failover_points
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.errors import Result
from railscope.probes.nccl.records.failover import (
    STATUSES,
    FailoverLayout,
    FailoverStat,
    PortState,
    failover_layout,
    status_name,
)
from railscope.probes.nccl.records.internals import layout_record
from tests.nccl.library import LIBRARIES, nccl_library
from tests.root.caller import Caller
from tests.root.probe_targets import assemble, loaded, on_x86_64, target
from tests.root.test_sends_over_infiniband import BUILDS, SEND, Connection, sent

pytestmark = [pytest.mark.root, pytest.mark.nccl, on_x86_64]

LIBRARY = 3
NEWEST = "2.32.3"
RETRIES_EXCEEDED, FLUSHED = (STATUSES.index(f"IBV_WC_{name}") for name in ("RETRY_EXC_ERR", "WR_FLUSH_ERR"))
REMOTE_ACCESS = STATUSES.index("IBV_WC_REM_ACCESS_ERR")
VENDOR_ERROR, QUEUE_PAIR = 0x81, 4711
DEVICES = (5, 1)
_INTS_OF_PROPERTIES = 1 + 8
"""ncclNetVDeviceProps_t of 2.30 and newer: how many devices, and their numbers; the connection's direction follows."""


@dataclass(frozen=True, slots=True)
class Forged:
    """A connection that sends, in the memory of a process that has the library."""

    internals: Internals
    caller: Caller
    structures: dict[str, Structure]
    layout: FailoverLayout
    handle: int
    """Address of ncclIbResiliencyHandleCompletionError."""
    connection: Connection
    resiliency: int

    def fail(self, place: int, status: int) -> int:
        """NCCL meets a completion with this status on the port; returns what it makes of that."""
        completion = self.caller.memory(48)
        words = struct.pack("<QIIIIII", 0, status, 0xDEAD, VENDOR_ERROR, 0xDEAD, 0, QUEUE_PAIR)
        for at in range(0, len(words), 8):
            self.caller.store(completion + at, int.from_bytes(words[at : at + 8], "little"), 8)
        return self.caller.call_at(self.handle, 1, self.resiliency, completion, place)

    def states(self) -> tuple[int, ...] | None:
        memory = os.open(f"/proc/{self.caller.pid}/mem", os.O_RDONLY)
        try:
            return read_port_states(memory, self.connection.address, self.resiliency, self.layout)
        finally:
            os.close(memory)

    def set_state(self, place: int, state: PortState) -> None:
        at = self.resiliency + self.layout.devices + place * self.layout.device_size + self.layout.device_state
        self.caller.store(at, state, 4)


@contextmanager
def forged(folder: Path, attach: AttachKind = AttachKind.MULTI) -> Iterator[tuple[Forged, int]]:
    """The forged connection, and the address of what stands in for ncclIbMultiSend."""
    layouts, path = Layouts.load(), nccl_library(NEWEST)
    structures = dict(layouts.structures(BUILDS[NEWEST]))
    layout = failover_layout(structures)
    assert layout is not None
    sends = assemble(folder, **{SEND: "push %rbp; pop %rbp; xor %eax, %eax; ret"})
    with ExitStack() as stack:
        to = stack.enter_context(target(path, layouts))
        programs = stack.enter_context(loaded(to, attach=attach))
        internals = Internals.load(programs)
        stack.callback(internals.close)
        internals.describe(LIBRARY, layout_record(structures))
        with path.open("rb") as file, Elf.open(file.fileno()) as elf:
            points, start = failover_points(elf, LIBRARY), elf.symbols([SYMBOL])[SYMBOL].file_offset
        with sends.open("rb") as file, Elf.open(file.fileno()) as elf:
            of_sends, send = internal_points(elf, LIBRARY), elf.symbols([SEND])[SEND].file_offset
        stack.callback(internals.watch_failover(str(path), points).close)
        stack.callback(internals.attach(str(sends), of_sends, Level.RAILS).close)
        caller = to.caller
        connection = Connection.over(caller, structures, DEVICES)
        resiliency = caller.memory(structures["ncclIbResiliency"].size_bytes)
        caller.store(resiliency + layout.comm, connection.address, 8)
        caller.store(resiliency + layout.count, len(DEVICES), 4)
        caller.store(connection.address + layout.comm_resiliency, resiliency, 8)
        caller.store(connection.address + 4 * _INTS_OF_PROPERTIES, 1, 1)
        function = caller.address_of(path, start)
        made = Forged(internals, caller, structures, layout, function, connection, resiliency)
        caller.load(sends)
        yield made, caller.address_of(sends, send)


def only(events: Records) -> Any:
    assert len(events) == 1
    return events[0]


@pytest.mark.parametrize("attach", AttachKind)
@pytest.mark.parametrize("status", [RETRIES_EXCEEDED, FLUSHED], ids=status_name)
def test_a_port_that_fails_is_told_once_with_what_the_completion_says(
    tmp_path: Path, attach: AttachKind, status: int
) -> None:
    with forged(tmp_path, attach) as (found, _):
        assert found.states() == (PortState.OK, PortState.OK)
        assert found.fail(1, status) == Result.SUCCESS
        event = only(found.internals.failover_events())
        assert found.states() == (PortState.OK, event["state"])
        assert (event["comm"], event["resiliency"]) == (found.connection.address, found.resiliency)
        assert (event["tgid"], event["library"], event["result"]) == (found.caller.pid, LIBRARY, Result.SUCCESS)
        assert (status_name(event["status"]), event["vendor_error"]) == (status_name(status), VENDOR_ERROR)
        assert event["queue_pair"] == QUEUE_PAIR
        assert (event["place"], event["count"], event["state"]) == (1, 2, PortState.ERROR)
        assert event["devices"].tolist() == [*DEVICES, *[-1] * 6]
        # What was under way on that port fails as well.
        assert found.fail(1, FLUSHED) == Result.SUCCESS
        assert not len(found.internals.failover_events())
        assert found.internals.failover.stats()[FailoverStat.UNREADABLE] == 0


def test_where_nccl_gives_up_that_is_told_and_no_failover(tmp_path: Path) -> None:
    with forged(tmp_path) as (found, _):
        assert found.fail(0, REMOTE_ACCESS) == Result.REMOTE_ERROR
        event = only(found.internals.failover_events())
        assert (event["result"], event["state"]) == (Result.REMOTE_ERROR, PortState.OK)
        assert found.fail(0, RETRIES_EXCEEDED) == Result.SUCCESS
        # It goes on without one port, not without two.
        assert found.fail(1, RETRIES_EXCEEDED) == Result.REMOTE_ERROR
        assert found.internals.failover_events()["result"].tolist() == [Result.SUCCESS, Result.REMOTE_ERROR]


def test_a_connection_that_sends_without_a_failure_calls_nothing_that_is_probed(tmp_path: Path) -> None:
    """The twin: and its bytes go to the ports in equal parts."""
    with forged(tmp_path) as (found, send):
        for _ in range(100):
            found.connection.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (100, 50_000), 1: (100, 50_000)}
        assert found.internals.failover.stats() == dict.fromkeys(FailoverStat, 0)
        assert not len(found.internals.failover_events())


def test_the_next_port_carries_the_bytes_until_nccl_takes_the_failed_one_back(tmp_path: Path) -> None:
    with forged(tmp_path) as (found, send):
        other = Connection.over(found.caller, found.structures, DEVICES)
        assert found.fail(0, RETRIES_EXCEEDED) == Result.SUCCESS
        found.connection.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {1: (2, 1000)}
        other.send(send, slot=0, sizes=(10,))  # of another connection no port failed
        assert sent(found.internals) == {5: (1, 5), 1: (3, 1005)}
        found.set_state(0, PortState.OK)
        found.connection.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (2, 505), 1: (4, 1505)}


def test_a_connection_that_is_forgotten_or_closed_is_not_asked_any_more(tmp_path: Path) -> None:
    with forged(tmp_path) as (found, send):
        found.fail(0, RETRIES_EXCEEDED)
        found.internals.forget_failed_over([(found.caller.pid, found.connection.address)])
        found.connection.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (1, 500), 1: (1, 500)}
        found.set_state(0, PortState.OK)
        found.fail(0, RETRIES_EXCEEDED)
        assert found.states() == (PortState.ERROR, PortState.OK)
        found.caller.store(found.connection.address + found.layout.comm_resiliency, 0, 8)
        assert found.states() is None
        found.connection.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (2, 1000), 1: (2, 1000)}


@pytest.mark.parametrize("version", [name for name in LIBRARIES if name != NEWEST])
def test_versions_that_cannot_fail_over_have_nothing_to_probe(version: str) -> None:
    with nccl_library(version).open("rb") as file, Elf.open(file.fileno()) as elf:
        assert failover_points(elf, LIBRARY) == ()
        assert failover_layout(Layouts.load().structures(elf.build_id)) is None
