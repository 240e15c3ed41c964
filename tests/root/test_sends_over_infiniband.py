"""Bytes that NCCL hands to InfiniBand devices, on forged connections of several versions' layouts.

The function does nothing; what it is given is what ncclIbIsend() gives to ncclIbMultiSend().  The real transport runs
in a virtual machine (tests/vm).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.functions.internals import Level, internal_points
from railscope.probes.nccl.layouts.layout import TABLE, Layouts, Structure
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.internals import InternalStat, NetworkKind, layout_record
from tests.root.caller import Caller
from tests.root.probe_targets import assemble, loaded, on_x86_64, target

pytestmark = [pytest.mark.root, on_x86_64]

LIBRARY = 3
SEND = "_Z15ncclIbMultiSendP14ncclIbSendCommi"
BUILDS = {build["nccl_version"]: build_id for build_id, build in json.loads(TABLE.read_text())["builds"].items()}
VERSIONS = ("2.20.5", "2.27.7", "2.32.3")
"""Each device has a structure of its own; they are numbers in a row; what the receiver wants has another name."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A forged ncclIbSendComm in the caller's memory."""

    caller: Caller
    structures: dict[str, Structure]
    address: int

    @classmethod
    def over(cls, caller: Caller, structures: dict[str, Structure], devices: Sequence[int]) -> Connection:
        made = cls(caller, structures, caller.memory(structures["ncclIbSendComm"].size_bytes))
        fields = structures["ncclIbSendComm"].offsets
        count = fields.get("base.vProps.ndevs", fields.get("base.ndevs"))
        assert count is not None
        caller.store(made.address + count, len(devices), 4)
        for place, device in enumerate(devices):
            if "base.vProps.devs" in fields:
                at = fields["base.vProps.devs"] + 4 * place
            else:
                own = structures["ncclIbSendCommDev"]
                at = fields["devs"] + own.size_bytes * place + own.offsets["base.ibDevN"]
            caller.store(made.address + at, device, 4)
        return made

    def send(self, function: int, slot: int, sizes: Sequence[int]) -> None:
        """The receiver is ready for so many messages; the slot holds requests of these sizes."""
        fields = self.structures["ncclIbSendComm"].offsets
        ready, requests = fields.get("ctsFifo", fields.get("fifo")), fields.get("sendReqs", fields.get("fifoReqs"))
        assert ready is not None
        assert requests is not None
        entry = self.structures["ncclIbSendFifo"]
        at = self.address + ready + slot * 8 * entry.size_bytes + entry.offsets["nreqs"]
        self.caller.store(at, len(sizes), 4)
        for place, size_bytes in enumerate(sizes):
            request = self.caller.memory(self.structures["ncclIbRequest"].size_bytes)
            self.caller.store(request + self.structures["ncclIbRequest"].offsets["send.size"], size_bytes, 4)
            self.caller.store(self.address + requests + 8 * (8 * slot + place), request, 8)
        self.caller.call_at(function, 1, self.address, slot)


@contextmanager
def observed(folder: Path, version: str) -> Iterator[tuple[Internals, Caller, dict[str, Structure], int]]:
    layouts = Layouts.load()
    structures = dict(layouts.structures(BUILDS[version]))
    path = assemble(folder, **{SEND: "push %rbp; pop %rbp; xor %eax, %eax; ret"})
    with ExitStack() as stack:
        to = stack.enter_context(target(path, layouts))
        programs = stack.enter_context(loaded(to))
        internals = Internals.load(programs)
        stack.callback(internals.close)
        internals.describe(LIBRARY, layout_record(structures))
        with path.open("rb") as file, Elf.open(file.fileno()) as elf:
            points, start = internal_points(elf, LIBRARY), elf.symbols([SEND])[SEND].file_offset
        stack.callback(internals.attach(str(path), points, Level.RAILS).close)
        yield internals, to.caller, structures, to.caller.address_of(path, start)


def sent(internals: Internals) -> dict[int, tuple[int, int]]:
    """Messages and bytes by device."""
    found = internals.sent()
    assert {one.network for one in found} == {NetworkKind.IB}
    assert internals.stats()[InternalStat.UNREADABLE] == 0
    return {one.device: (one.messages, one.bytes) for one in found}


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_that_go_together_are_shared_by_the_devices_of_their_connection(tmp_path: Path, version: str) -> None:
    with observed(tmp_path, version) as (internals, caller, structures, function):
        connection = Connection.over(caller, structures, (5, 1))
        connection.send(function, slot=2, sizes=(1000, 2001, 8))
        assert sent(internals) == {5: (1, 1504), 1: (1, 1505)}
        connection.send(function, slot=7, sizes=(1 << 30,))
        assert sent(internals) == {5: (2, 1504 + (1 << 29)), 1: (2, 1505 + (1 << 29))}


def test_a_connection_may_use_eight_devices_from_2_30_on(tmp_path: Path) -> None:
    with observed(tmp_path, "2.32.3") as (internals, caller, structures, function):
        Connection.over(caller, structures, range(8)).send(function, slot=0, sizes=(8000,))
        assert sent(internals) == dict.fromkeys(range(8), (1, 1000))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_connection_of_one_device_hands_everything_to_it(tmp_path: Path, version: str) -> None:
    with observed(tmp_path, version) as (internals, caller, structures, function):
        connection = Connection.over(caller, structures, (3,))
        connection.send(function, slot=0, sizes=tuple(range(1, 9)))
        assert sent(internals) == {3: (1, 36)}


def test_what_is_no_connection_is_counted_as_unreadable_and_no_bytes(tmp_path: Path) -> None:
    with observed(tmp_path, "2.32.3") as (internals, caller, structures, function):
        for devices in ((), tuple(range(9))):
            Connection.over(caller, structures, devices).send(function, slot=0, sizes=(100,))
        assert internals.sent() == []
        assert internals.stats()[InternalStat.UNREADABLE] == 2
