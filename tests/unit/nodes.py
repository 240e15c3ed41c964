"""Nodes for the tests of the live view: what an agent would serve of a snapshot, and the same node a while later.

Simulated: the snapshots are made up; the pages are those that an agent makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from railscope.agent.facts.hardware import NvlinkFacts
from railscope.agent.facts.rank_process import RankProcess
from railscope.agent.facts.snapshot import NodeCollectives, RailFacts, Snapshot
from railscope.exporters.series.families import make_families
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format, Renderer
from railscope.exporters.top.node_view import NodeView, make_node_view
from railscope.exporters.top.scraped import NodeScrape, parse_scrape
from railscope.exporters.web.pages import render_communicators, render_stalls, render_transfers
from tests.unit.exporters_snapshots import full_snapshot

STEP_SECONDS = 2
CALLS = 240
"""Made on each communicator within a step."""
MIB = 1 << 20


def exposition(snapshot: Snapshot, selection: Selection | None = None) -> str:
    return Renderer().render(make_families(snapshot, selection=selection), Format.PROMETHEUS).decode()


def scraped(
    snapshot: Snapshot,
    *,
    with_communicators: bool = True,
    with_transfers: bool = False,
    processes: Sequence[RankProcess] = (),
    selection: Selection | None = None,
) -> NodeScrape:
    """What a scrape of this node finds; without communicators: of an agent that has no page of them.

    `selection`: of an agent that was asked before; None: of one that has just begun.
    """
    page = render_communicators(snapshot, processes) if with_communicators else None
    transfers = render_transfers(snapshot) if with_transfers else None
    return parse_scrape(exposition(snapshot, selection), render_stalls(snapshot, processes), page, transfers)


def later(snapshot: Snapshot, steps: int = 1) -> Snapshot:
    """The node some steps of two seconds later: 120 AllReduce of 1 MiB a second, 30 GB/s sent, 15 GB/s received."""
    nanoseconds = STEP_SECONDS * steps * 1_000_000_000
    return replace(
        snapshot,
        realtime_ns=snapshot.realtime_ns + nanoseconds,
        monotonic_ns=snapshot.monotonic_ns + nanoseconds,
        collectives=_collectives_later(snapshot.collectives, steps),
        rails=tuple(_rail_later(one, steps) for one in snapshot.rails),
        gpus=replace(snapshot.gpus, nvlinks=tuple(_nvlink_later(one, steps) for one in snapshot.gpus.nvlinks)),
    )


def _collectives_later(collectives: NodeCollectives, steps: int) -> NodeCollectives:
    calls = CALLS * steps
    return replace(
        collectives,
        totals=tuple(
            replace(one, calls=one.calls + calls, payload_bytes=one.payload_bytes + calls * MIB)
            if one.op == "AllReduce"
            else one
            for one in collectives.totals
        ),
        communicators=tuple(
            replace(
                one,
                enqueued=one.enqueued + calls,
                completed=None if one.completed is None else one.completed + calls,
                ops=tuple(
                    replace(op, calls=op.calls + calls, payload_bytes=op.payload_bytes + calls * MIB) for op in one.ops
                ),
            )
            for one in collectives.communicators
        ),
        times=replace(
            collectives.times,
            by_rank=tuple(
                replace(one, operations=one.operations + calls, seconds=one.seconds + 1.2 * steps)
                for one in collectives.times.by_rank
            ),
            by_size=tuple(
                replace(
                    one,
                    payload_bytes=one.payload_bytes + calls * MIB,
                    bus_bytes=one.bus_bytes + calls * MIB * 3 // 2,
                    seconds=one.seconds + steps,
                )
                for one in collectives.times.by_size
            ),
        ),
    )


def _rail_later(rail: RailFacts, steps: int) -> RailFacts:
    assert rail.transmit_bytes is not None
    assert rail.receive_bytes is not None
    return replace(
        rail,
        transmit_bytes=rail.transmit_bytes + 60_000_000_000 * steps,
        receive_bytes=rail.receive_bytes + 30_000_000_000 * steps,
    )


def _nvlink_later(link: NvlinkFacts, steps: int) -> NvlinkFacts:
    """10 GB/s sent and 5 GB/s received, where the GPU counts."""
    return replace(
        link,
        transmit_bytes=None if link.transmit_bytes is None else link.transmit_bytes + 20_000_000_000 * steps,
        receive_bytes=None if link.receive_bytes is None else link.receive_bytes + 10_000_000_000 * steps,
    )


def healthy() -> Snapshot:
    """The full snapshot without a stall, now or before."""
    full = full_snapshot()
    return replace(full, stalls=replace(full.stalls, lengths=(), ended=()), simulated=False)


def view_of(before: Snapshot, now: Snapshot) -> NodeView:
    return make_node_view(scraped(before), scraped(now))
