"""Findings on communicators that go on, more slowly, because NCCL moved connections off a port that failed.

Nothing waits, so this is no stall and none of its causes.  Both ends of a connection fail over, each by itself, so that
the peers of the host whose port failed tell of ports of theirs too.  Of all hosts that one has most connections that
moved, as each of its peers has only those to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from railscope.agent.cluster.fleet.facts import FailedOver, Fleet
from railscope.agent.cluster.verdict.advice import Step
from railscope.agent.cluster.verdict.finding import Finding
from railscope.agent.cluster.verdict.names import format_hosts
from railscope.agent.cluster.verdict.quantities import format_rank_numbers, format_rate
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import rail_name

CAUSE: Final = "failed_over"
"""Of such a finding; no `Cause`, as nothing is stalled."""
_MOST_LINES: Final = 4
_Port = tuple[str, str, str, str]
"""Host, rail, device, port."""


def degraded_findings(fleet: Fleet, comm: str | None) -> tuple[Finding, ...]:
    """One finding for each rail on which ports failed, of one communicator or of all; the widest first."""
    rails: defaultdict[str, list[FailedOver]] = defaultdict(list)
    for one in fleet.failed_over:
        if comm is None or one.comm == comm:
            rails[one.rail or one.device].append(one)
    found = sorted(rails.values(), key=lambda rows: (-sum(row.connections for row in rows), rows[0].device))
    return tuple(_finding(rows) for rows in found)


def _finding(rows: Sequence[FailedOver]) -> Finding:
    ports: defaultdict[_Port, list[FailedOver]] = defaultdict(list)
    for row in rows:
        ports[row.host, row.rail, row.device, row.port].append(row)
    widest = sorted(ports, key=lambda port: (-sum(row.connections for row in ports[port]), port))
    host, rail, device, port = widest[0]
    comms = sorted({row.comm for row in rows if row.comm != UNKNOWN})
    ranks = sorted({row.rank for row in ports[widest[0]] if row.rank != UNKNOWN})
    others = [other for other, *_ in widest[1:] if other != host]
    first = ports[widest[0]][0]
    moved = sum(row.connections for row in ports[widest[0]])
    also = f", and ports of {format_count(len(set(others)), 'more host')}" if others else ""
    who = (
        f"communicator {comms[0]}" if len(comms) == 1 else f"{len(comms)} communicators" if comms else "a communicator"
    )
    return Finding(
        cause=CAUSE,
        comm=comms[0] if comms else "",
        nranks=None,
        op="",
        seconds=None,
        strength="strong",
        basis="host",
        ranks=tuple(ranks),
        hosts=tuple(dict.fromkeys(other for other, *_ in widest)),
        world_ranks=(),
        pids=(),
        rails=(rail,) if rail else (),
        devices=(device,),
        headline=f"DEGRADED: {who} {'go' if len(comms) > 1 else 'goes'} on without "
        f"{rail_name(rail, device, '') if rail else device} of {host}{also}: the port failed, and NCCL moved "
        f"{format_count(moved, 'connection')} to {first.carried_by}.",
        evidence=tuple(line for place in widest[:_MOST_LINES] for line in _evidence(place, ports[place])),
        healthy=("nothing waits: NCCL sent again what was lost, and the job goes on with less bandwidth",),
        waiting=(),
        next_steps=(
            Step(host, f"rdma link show {device}/{port or 1}", "whether the port is down, or up again"),
            Step(host, f"journalctl -k --since -1h | grep -i {device}", "a link that went down, a cable, a reset"),
            Step("", "", "the switch port at its other end, and the counters of both"),
        ),
        unknown=_unknown(rows, others),
    )


def _evidence(place: _Port, rows: Sequence[FailedOver]) -> Sequence[str]:
    host, _, device, port = place
    said = sorted({(row.status, row.vendor_error) for row in rows})
    ranks = format_rank_numbers(sorted({row.rank for row in rows}))
    moved = format_count(sum(row.connections for row in rows), "connection")
    told = "; ".join(f"{status}, vendor error {vendor}" for status, vendor in said[:_MOST_LINES])
    lines = [f"{host}: {moved} of {ranks} left {device} port {port or UNKNOWN}: the completions said {told}"]
    carriers = {row.carried_by: row.carrier_transmit for row in rows}
    now = ", ".join(f"{name} {format_rate(rate)}" for name, rate in sorted(carriers.items()))
    lines.append(f"{host} sends now: {device} {format_rate(rows[0].transmit)}, {now} (port bytes, of all its jobs)")
    return lines


def _unknown(rows: Sequence[FailedOver], others: Sequence[str]) -> tuple[str, ...]:
    lines = []
    if others:
        lines.append(
            "at which end the fault is: both ends of a connection fail over; the port with most of them is named "
            f"first, and others are on {format_hosts(sorted(set(others)))}"
        )
    if any(row.comm == UNKNOWN for row in rows):
        lines.append("of some connections, whose they are: at level counts, and until their next operation")
    return tuple(lines)
