"""NCCL's own failover: the real library's function that handles a failed completion, called on a forged connection.

No port, no network and no second rank take part.  Which bytes go where afterwards is looked at where connections send:
ncclIbMultiSend stands in, and does nothing.
"""

from __future__ import annotations

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
from railscope.probes.nccl.programs.failover import failover_points
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.errors import Result
from railscope.probes.nccl.records.failover import STATUSES, FailoverStat, PortState, failover_layout, status_name
from railscope.probes.nccl.records.internals import layout_record
from railscope.testbed.nccl.library import nccl_library
from tests.nccl.library import LIBRARIES
from tests.root.caller import Caller
from tests.root.forged_failover import NEWEST, QUEUE_PAIR, VENDOR_ERROR, ForgedConnection
from tests.root.probe_targets import assemble, loaded, on_x86_64, target
from tests.root.test_sends_over_infiniband import BUILDS, SEND, Connection, sent

pytestmark = [pytest.mark.root, pytest.mark.nccl, on_x86_64]

LIBRARY = 3
RETRIES_EXCEEDED, FLUSHED = (STATUSES.index(f"IBV_WC_{name}") for name in ("RETRY_EXC_ERR", "WR_FLUSH_ERR"))
REMOTE_ACCESS = STATUSES.index("IBV_WC_REM_ACCESS_ERR")
DEVICES = (5, 1)


@dataclass(frozen=True, slots=True)
class Forged:
    """A connection that sends, and the programs that watch it."""

    internals: Internals
    structures: dict[str, Structure]
    sending: Connection
    ports: ForgedConnection

    @property
    def caller(self) -> Caller:
        return self.ports.caller


@contextmanager
def forged(folder: Path, attach: AttachKind = AttachKind.MULTI) -> Iterator[tuple[Forged, int]]:
    """The forged connection, and the address of what stands in for ncclIbMultiSend."""
    layouts, path = Layouts.load(), nccl_library(NEWEST)
    structures = dict(layouts.structures(BUILDS[NEWEST]))
    sends = assemble(folder, **{SEND: "push %rbp; pop %rbp; xor %eax, %eax; ret"})
    with ExitStack() as stack:
        to = stack.enter_context(target(path, layouts))
        programs = stack.enter_context(loaded(to, attach=attach))
        internals = Internals.load(programs)
        stack.callback(internals.close)
        internals.describe(LIBRARY, layout_record(structures))
        with path.open("rb") as file, Elf.open(file.fileno()) as elf:
            points = failover_points(elf, LIBRARY)
        with sends.open("rb") as file, Elf.open(file.fileno()) as elf:
            of_sends, send = internal_points(elf, LIBRARY), elf.symbols([SEND])[SEND].file_offset
        stack.callback(internals.watch_failover(str(path), points).close)
        stack.callback(internals.attach(str(sends), of_sends, Level.RAILS).close)
        sending = Connection.over(to.caller, structures, DEVICES)
        ports = ForgedConnection.over(path, to.caller, structures, sending.address, DEVICES)
        to.caller.load(sends)
        yield Forged(internals, structures, sending, ports), to.caller.address_of(sends, send)


def only(events: Records) -> Any:
    assert len(events) == 1
    return events[0]


@pytest.mark.parametrize("attach", AttachKind)
@pytest.mark.parametrize("status", [RETRIES_EXCEEDED, FLUSHED], ids=status_name)
def test_a_port_that_fails_is_told_once_with_what_the_completion_says(
    tmp_path: Path, attach: AttachKind, status: int
) -> None:
    with forged(tmp_path, attach) as (found, _):
        assert found.ports.states() == (PortState.OK, PortState.OK)
        assert found.ports.fail(1, status) == Result.SUCCESS
        event = only(found.internals.failover_events())
        assert found.ports.states() == (PortState.OK, event["state"])
        assert (event["comm"], event["resiliency"]) == (found.ports.net, found.ports.resiliency)
        assert (event["tgid"], event["library"], event["result"]) == (found.caller.pid, LIBRARY, Result.SUCCESS)
        assert (status_name(event["status"]), event["vendor_error"]) == (status_name(status), VENDOR_ERROR)
        assert event["queue_pair"] == QUEUE_PAIR
        assert (event["place"], event["count"], event["state"]) == (1, 2, PortState.ERROR)
        assert event["devices"].tolist() == [*DEVICES, *[-1] * 6]
        # What was under way on that port fails as well.
        assert found.ports.fail(1, FLUSHED) == Result.SUCCESS
        assert not len(found.internals.failover_events())
        assert found.internals.failover.stats()[FailoverStat.UNREADABLE] == 0


def test_where_nccl_gives_up_that_is_told_and_no_failover(tmp_path: Path) -> None:
    with forged(tmp_path) as (found, _):
        assert found.ports.fail(0, REMOTE_ACCESS) == Result.REMOTE_ERROR
        event = only(found.internals.failover_events())
        assert (event["result"], event["state"]) == (Result.REMOTE_ERROR, PortState.OK)
        assert found.ports.fail(0, RETRIES_EXCEEDED) == Result.SUCCESS
        # It goes on without one port, not without two.
        assert found.ports.fail(1, RETRIES_EXCEEDED) == Result.REMOTE_ERROR
        assert found.internals.failover_events()["result"].tolist() == [Result.SUCCESS, Result.REMOTE_ERROR]


def test_a_connection_that_sends_without_a_failure_calls_nothing_that_is_probed(tmp_path: Path) -> None:
    """The twin: and its bytes go to the ports in equal parts."""
    with forged(tmp_path) as (found, send):
        for _ in range(100):
            found.sending.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (100, 50_000), 1: (100, 50_000)}
        assert found.internals.failover.stats() == dict.fromkeys(FailoverStat, 0)
        assert not len(found.internals.failover_events())


def test_the_next_port_carries_the_bytes_until_nccl_takes_the_failed_one_back(tmp_path: Path) -> None:
    with forged(tmp_path) as (found, send):
        other = Connection.over(found.caller, found.structures, DEVICES)
        assert found.ports.fail(0, RETRIES_EXCEEDED) == Result.SUCCESS
        found.sending.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {1: (2, 1000)}
        other.send(send, slot=0, sizes=(10,))  # of another connection no port failed
        assert sent(found.internals) == {5: (1, 5), 1: (3, 1005)}
        found.ports.set_state(0, PortState.OK)
        found.sending.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (2, 505), 1: (4, 1505)}


def test_a_connection_that_is_forgotten_or_closed_is_not_asked_any_more(tmp_path: Path) -> None:
    with forged(tmp_path) as (found, send):
        found.ports.fail(0, RETRIES_EXCEEDED)
        found.internals.forget_failed_over([(found.caller.pid, found.ports.net)])
        found.sending.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (1, 500), 1: (1, 500)}
        found.ports.set_state(0, PortState.OK)
        found.ports.fail(0, RETRIES_EXCEEDED)
        assert found.ports.states() == (PortState.ERROR, PortState.OK)
        found.caller.store(found.ports.net + found.ports.layout.comm_resiliency, 0, 8)
        assert found.ports.states() is None
        found.sending.send(send, slot=0, sizes=(1000,))
        assert sent(found.internals) == {5: (2, 1000), 1: (2, 1000)}


@pytest.mark.parametrize("version", [name for name in LIBRARIES if name != NEWEST])
def test_versions_that_cannot_fail_over_have_nothing_to_probe(version: str) -> None:
    with nccl_library(version).open("rb") as file, Elf.open(file.fileno()) as elf:
        assert failover_points(elf, LIBRARY) == ()
        assert failover_layout(Layouts.load().structures(elf.build_id)) is None
