"""Kernel plans and sends of which little can be read, on forged structures of several versions' layouts.

The functions do nothing (simulated): what they are given is what NCCL gives them.  Graphs and sends of the real library
are in tests/nccl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.layouts.layout import TABLE, Layouts, comm_layout
from railscope.probes.nccl.records.internals import NO_NET_DEVICE, InternalStat, NetworkKind
from tests.root.forged_proxy import FUNCTIONS, Probed, forged, probed
from tests.root.probe_targets import all_reduce, assemble, attached, loaded, on_x86_64, target

pytestmark = [pytest.mark.root, on_x86_64]

BUILDS = {build["nccl_version"]: build_id for build_id, build in json.loads(TABLE.read_text())["builds"].items()}
VERSIONS = ("2.23.4", "2.28.9", "2.32.3")
LAUNCH = "_Z16ncclLaunchKernelP8ncclCommP14ncclKernelPlan"
REPLAY = "_ZL22hostStreamPlanCallbackPv"
SEND = "_Z18ncclNetSocketIsendPvS_miS_S_PS_"


@contextmanager
def observed(folder: Path, version: str) -> Iterator[Probed]:
    layouts = Layouts.load()
    structures = layouts.structures(BUILDS[version])
    names = (*FUNCTIONS, LAUNCH, REPLAY, SEND, "ncclAllReduce")
    path = assemble(folder, **dict.fromkeys(names, "push %rbp; pop %rbp; xor %eax, %eax; ret"))
    with target(path, layouts) as found:
        to = replace(found, layout=comm_layout(structures["ncclComm"], "dwarf", version))
        made = forged(to, structures)
        with loaded(to) as programs, attached(programs, to), probed(programs, made) as probes:
            all_reduce(to, 1, made.comm)
            yield probes


def call(probes: Probed, symbol: str, *words: int) -> None:
    path = probes.forged.target.path
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        start = elf.symbols([symbol])[symbol].file_offset
    caller = probes.forged.target.caller
    caller.call_at(caller.address_of(path, start), 1, *words)


def plan(probes: Probed, collectives: int, *, captured: bool) -> int:
    address = probes.forged.new("ncclKernelPlan")
    probes.forged.store(address, "ncclKernelPlan", 8, comm=probes.forged.comm)
    probes.forged.store(address, "ncclKernelPlan", collOpCount=collectives)
    probes.forged.store(address, "ncclKernelPlan", 1, persistent=captured)
    return address


@pytest.mark.parametrize("version", VERSIONS)
def test_only_what_a_graph_replays_counts_as_unseen(tmp_path: Path, version: str) -> None:
    """While a graph lives, the host part of plans outside it may come by a callback as well: their calls were seen."""
    with observed(tmp_path, version) as probes:
        graph, plain = plan(probes, 3, captured=True), plan(probes, 100, captured=False)
        for address in (plain, graph):
            call(probes, LAUNCH, probes.forged.comm, address)
        call(probes, REPLAY, plain)
        assert (probes.progress().captured, probes.progress().replayed) == (3, 0)
        for _ in range(2):
            call(probes, REPLAY, graph)
        call(probes, REPLAY, plain)
        assert (probes.progress().captured, probes.progress().replayed) == (3, 6)


def test_bytes_count_also_where_their_device_cannot_be_read(tmp_path: Path) -> None:
    with observed(tmp_path, "2.32.3") as probes:
        call(probes, SEND, 16, probes.forged.target.caller.memory(64), 4096, 0, 0, 0, 0)
        (sent,) = probes.internals.sent()
        assert (sent.network, sent.device, sent.messages, sent.bytes) == (NetworkKind.SOCKET, NO_NET_DEVICE, 1, 4096)
        assert probes.internals.stats()[InternalStat.UNREADABLE] == 1
