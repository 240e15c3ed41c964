"""Timelines as a trace that https://ui.perfetto.dev opens.

Below each host: what was recorded of it and what is missing, its rails with their rates and links, and its processes
with their communicators: calls, network legs, stalls.  Arrows join what several ranks did for one operation, in the
order of time: the last one came last; if it is unknown which operations are the same, the communicator says so.  How
far hosts' clocks may be apart stands in the hosts' names.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from railscope.agent.recording.recording import RecordedStall
from railscope.agent.trace.same_operations import SameOperations
from railscope.agent.trace.timeline import (
    NOT_ENDED,
    NOT_KNOWN,
    HostTimeline,
    Rows,
    TimelineCommunicator,
)

if TYPE_CHECKING:
    from railscope.agent.trace.perfetto_packets import Packets, Shape, Value

_RATE: Final = "bytes per second between two samples; 0 after the last sample, where nothing was measured"
_NETWORK: Final = (
    "from hand-over to NCCL's proxy threads to the last completion; stacked slices: in flight at the same time"
)
_MAKING_MISSED: Final = (
    "not all ranks are joined by arrows: some were first seen at a call, not at their making, so that earlier calls "
    "may be missing and their numbers may not compare, and times do not tell which operations are the same"
)
_NOT_KNOWN_WHETHER: Final = (
    "not all ranks are joined by arrows: the recording does not tell whether all were watched from the first call on, "
    "so that their numbers may not compare, and times do not tell which operations are the same"
)
_MOST_SHAPES: Final = 4096
"""That are kept at a time for one communicator."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What was written."""

    packets: int
    calls: int
    operations: int
    """Complete ones."""
    unfinished: int
    rail_samples: int


def write_trace(hosts: Sequence[HostTimeline], same: SameOperations, file: IO[bytes]) -> TraceSummary:
    """Write the trace of these hosts, with arrows between what is the same, to a file that is open for writing.

    Raises:
        OSError: it cannot be written.
        ModuleNotFoundError: the `perfetto` package is not installed.
    """
    # An extra: who does not ask for traces does not need it.
    from railscope.agent.trace.perfetto_packets import Packets

    packets = Packets(file, min(host.began_ns for host in hosts))
    no_arrows = {comm: _MAKING_MISSED if comm in same.making_missed else _NOT_KNOWN_WHETHER for comm in same.not_joined}
    names = Counter(host.host for host in hosts)
    for at, host in enumerate(hosts):
        # Tracks of one name would be drawn as one.
        name = host.host if names[host.host] == 1 else f"{host.host} · {Path(host.source).name} {at + 1}"
        _Host(packets, name, host, same.calls[at], same.operations[at], no_arrows).write()
    packets.close()
    ended = [int((host.operations["end_ns"] != NOT_ENDED).sum()) for host in hosts]
    return TraceSummary(
        packets=packets.written,
        calls=sum(len(host.calls) for host in hosts),
        operations=sum(ended),
        unfinished=sum(len(host.operations) for host in hosts) - sum(ended),
        rail_samples=sum(len(host.rail_samples) for host in hosts),
    )


def describe_clock(host: HostTimeline) -> str:
    """How right the clock of a trace's host is, in a few words."""
    return "clock error unknown" if host.error_ns is None else f"clock ±{host.error_ns / 1e6:.3g} ms"


class _Host:
    """Writes one host."""

    def __init__(
        self,
        packets: Packets,
        name: str,
        host: HostTimeline,
        call_flows: Rows,
        operation_flows: Rows,
        no_arrows: Mapping[str, str],
    ) -> None:
        """`no_arrows`: why not all ranks of a communicator are joined by arrows."""
        self._packets = packets
        self._name = name
        self._host = host
        self._call_flows = call_flows
        self._operation_flows = operation_flows
        self._no_arrows = no_arrows
        self._stall_tracks: dict[tuple[str, str], int] = {}
        """By communicator and rank."""

    def write(self) -> None:
        host, packets = self._host, self._packets
        simulated = ", SIMULATED hardware" if host.simulated else ""
        top = packets.add_track(f"{self._name} ({describe_clock(host)}{simulated})", description=f"from {host.source}")
        self._write_recording(packets.add_track("recording", top))
        own_marks = [mark for mark in host.marks if mark.instance is None]
        if own_marks:
            track = packets.add_track("marks", top)
            for mark in own_marks:
                packets.add_instant(track, packets.make_shape(mark.text, "mark"), mark.time_ns)
        self._write_rails(top)
        pids = sorted({one.pid for one in host.communicators} | set(np.unique(host.compute["pid"]).tolist()))
        for pid in pids:
            self._write_process(top, pid, [one for one in host.communicators if one.pid == pid])
        self._write_stalls(top)

    def _write_recording(self, track: int) -> None:
        host = self._host
        said: dict[str, Value] = {
            "recorder": host.recorder,
            "kernel": host.kernel,
            "reason": host.reason,
            "simulated": host.simulated,
            "clock_error_ns": "not known" if host.error_ns is None else host.error_ns,
            "source": host.source,
        }
        said |= {f"missing {number}": text for number, text in enumerate(host.missing, 1)}
        unjoined: defaultdict[str, list[str]] = defaultdict(list)
        for comm in sorted({one.comm for one in host.communicators if one.comm in self._no_arrows}):
            unjoined[self._no_arrows[comm]].append(comm)
        if unjoined:
            said["no arrows"] = "; ".join(f"{', '.join(comms)}: {why}" for why, comms in unjoined.items())
        name = "recorded, not all of it: see the arguments" if host.missing else "recorded"
        self._packets.add_slice(track, self._packets.make_shape(name, "recording", said), host.began_ns, host.ended_ns)

    # Rails

    def _write_rails(self, top: int) -> None:
        host, packets = self._host, self._packets
        if not host.rails:
            return
        rails = packets.add_track("rails", top)
        for rail in sorted(host.rails, key=lambda one: (one.netns, len(one.rail), one.rail, one.device)):
            number = f"rail {rail.rail} · " if rail.rail else ""
            track = packets.add_track(f"{number}{rail.device}{f' · {rail.netns}' if rail.netns else ''}", rails)
            samples = _select_rows(host.rail_samples, "rail", rail.rail_id)
            for name, field in (("transmit", "transmit_bytes"), ("receive", "receive_bytes")):
                if len(samples) > 1:
                    counter = packets.add_track(name, track, unit="B/s", description=_RATE)
                    for time_ns, rate in _rates(samples["time_ns"], samples[field]):
                        packets.add_counter_value(counter, time_ns, rate)
            links = _select_rows(host.link_events, "rail", rail.rail_id)
            if len(links):
                self._write_link(packets.add_track("link", track), links)

    def _write_link(self, track: int, links: Rows) -> None:
        """The states of a link, one slice each: what it was found to be until something else was found."""
        host = self._host
        begins = np.maximum(links["time_ns"], host.began_ns).tolist()
        ends = [*begins[1:], host.ended_ns]
        for link, begin_ns, end_ns in zip(links, begins, ends, strict=True):
            if end_ns > begin_ns:
                said = _drop_empty(carrier_changes=int(link["carrier_changes"]))
                self._packets.add_slice(
                    track, self._packets.make_shape(_link_state(link), "link", said), begin_ns, end_ns
                )

    # Processes

    def _write_process(self, top: int, pid: int, communicators: list[TimelineCommunicator]) -> None:
        host, packets = self._host, self._packets
        gpus = sorted({one.gpu for one in communicators if one.gpu})
        words = [f"pid {pid}" if pid else "process not known"]
        words += [f"GPU {', '.join(gpus)}"] if gpus else []
        words += sorted({f"world rank {one.world_rank}" for one in communicators if one.world_rank})
        words += sorted({f"job {one.job}" for one in communicators if one.job})
        words += sorted({one.netns for one in communicators if one.netns})
        process = packets.add_track(" · ".join(words), top)
        for one in sorted(communicators, key=lambda one: (one.comm, one.instance)):
            self._write_communicator(process, one)
        compute = _select_rows(host.compute, "pid", pid)
        for stream in np.unique(compute["stream"]).tolist():
            self._write_compute(process, stream, _select_rows(compute, "stream", stream))

    def _write_compute(self, process: int, stream: int, rows: Rows) -> None:
        host, packets = self._host, self._packets
        self._write_intervals(
            lambda: packets.add_track(f"kernels of stream {stream:#x}", process),
            rows,
            rows[["name"]],
            lambda key, _: packets.make_shape(host.word(key[0]) or "kernel", "compute"),
        )

    def _write_communicator(self, process: int, one: TimelineCommunicator) -> None:
        host, packets = self._host, self._packets
        rank = f" · rank {one.rank or '?'} of {one.nranks or '?'}"
        parent = packets.add_track(
            f"comm {one.comm}{rank}" if one.comm else "communicator not known",
            process,
            description=self._no_arrows.get(one.comm, ""),
        )
        marks = [mark for mark in host.marks if mark.instance == one.instance]
        if marks:
            track = packets.add_track("life", parent)
            for mark in marks:
                packets.add_instant(track, packets.make_shape(mark.text, "life"), mark.time_ns)
        own = [stall for stall in host.stalls if (stall.comm, stall.rank) == (one.comm, one.rank)]
        if own and (one.comm, one.rank) not in self._stall_tracks:
            self._stall_tracks[one.comm, one.rank] = parent
        chosen = np.flatnonzero(host.calls["instance"] == one.instance)
        if len(chosen):
            self._write_calls(packets.add_track("calls", parent), chosen)
        chosen = np.flatnonzero(host.operations["instance"] == one.instance)
        for source in np.unique(host.operations["source"][chosen]).tolist():
            of_source = chosen[host.operations["source"][chosen] == source]
            self._write_operations(parent, of_source, host.word(source))

    def _write_calls(self, track: int, chosen: Rows) -> None:
        host, packets = self._host, self._packets
        chosen = chosen[np.argsort(host.calls["time_ns"][chosen], kind="stable")]
        rows = host.calls[chosen][["op", "data_type", "payload_bytes", "peer", "tid", "time_ns", "sequence"]]
        shapes = _Shapes(
            lambda key: packets.make_shape(
                host.word(key[0]) or "call",
                "call",
                _drop_empty(data_type=host.word(key[1]), payload_bytes=key[2], peer=key[3], tid=key[4]),
            )
        )
        for row, flow in zip(rows.tolist(), self._call_flows[chosen].tolist(), strict=True):
            packets.add_instant(track, shapes[row[:5]], row[5], _sequence(row[6]), flow)

    def _write_operations(self, parent: int, chosen: Rows, source: str) -> None:
        host, packets = self._host, self._packets
        name, description = ("network", _NETWORK) if source == "proxy" else (source or "operations", "")

        def shape(key: tuple[int, ...], ended: bool) -> Shape:
            op, data_type, algorithm, protocol, channels, payload_bytes = key
            said = _drop_empty(
                data_type=host.word(data_type),
                payload_bytes=payload_bytes,
                algorithm=host.word(algorithm),
                protocol=host.word(protocol),
                channels=channels,
            )
            name = host.word(op) or "operation"
            return packets.make_shape(name if ended else f"{name} (unfinished)", "operation", said)

        rows = host.operations[chosen]
        self._write_intervals(
            lambda: packets.add_track(name, parent, description=description),
            rows,
            rows[["op", "data_type", "algorithm", "protocol", "channels", "payload_bytes"]],
            shape,
            rows["sequence"],
            self._operation_flows[chosen],
        )

    def _write_intervals(
        self,
        new_track: Callable[[], int],
        rows: Rows,
        keys: Rows,
        shape: Callable[[tuple[int, ...], bool], Shape],
        sequence: Rows | None = None,
        flows: Rows | None = None,
    ) -> None:
        """A slice for each row, from its `begin_ns` to its `end_ns`; what overlaps gets one more track of the name.

        `shape` makes what slices have in common from the row of `keys` and whether it ended.
        """
        order = np.lexsort((rows["end_ns"], rows["begin_ns"]))
        begins, ends, keys = rows["begin_ns"][order].tolist(), rows["end_ns"][order].tolist(), keys[order].tolist()
        numbers = [NOT_KNOWN] * len(order) if sequence is None else sequence[order].tolist()
        arrows = [0] * len(order) if flows is None else flows[order].tolist()
        free: list[tuple[int, int]] = []
        """When each track has room again, and which it is."""
        shapes = _Shapes(lambda key: shape(*key))
        for begin_ns, end_ns, key, number, flow in zip(begins, ends, keys, numbers, arrows, strict=True):
            ended = end_ns != NOT_ENDED
            track = heapq.heappop(free)[1] if free and free[0][0] <= begin_ns else new_track()
            # Whatever a clock says, nothing ends before it begins.
            last_ns = max(begin_ns, end_ns) if ended else None
            if last_ns is not None:
                heapq.heappush(free, (last_ns, track))
            self._packets.add_slice(track, shapes[key, ended], begin_ns, last_ns, _sequence(number), flow)

    # Stalls

    def _write_stalls(self, top: int) -> None:
        others = 0
        for stall in sorted(self._host.stalls, key=lambda one: one.since_realtime_ns):
            parent = self._stall_tracks.get((stall.comm, stall.rank))
            if parent is None:
                parent = others = others or self._packets.add_track("stalls", top)
            # A track for each: stalls of one rank may overlap, and are few.
            track = self._packets.add_track("stall", parent)
            shape = self._packets.make_shape(f"stall: {stall.cause}", "stall", _stall_details(stall))
            self._packets.add_slice(
                track, shape, stall.since_realtime_ns, stall.since_realtime_ns + round(stall.seconds * 1e9)
            )


class _Shapes(dict[Any, "Shape"]):
    """Shapes by what they are made from; made when they are first asked for."""

    def __init__(self, make: Callable[[Any], Shape]) -> None:
        self._make = make

    def __missing__(self, key: Any) -> Shape:
        if len(self) >= _MOST_SHAPES:
            self.clear()  # of messages that are all of another size, none is worth keeping
        shape = self[key] = self._make(key)
        return shape


def _drop_empty(**values: Value) -> dict[str, Value]:
    """What is known of these."""
    return {name: value for name, value in values.items() if value not in ("", NOT_KNOWN)}


def _sequence(number: int) -> int | None:
    return None if number == NOT_KNOWN else number


def _stall_details(stall: RecordedStall) -> dict[str, Value]:
    evidence = {f"evidence {number}": text for number, text in enumerate(stall.evidence, 1)}
    return _drop_empty(
        comm=stall.comm,
        rank=stall.rank,
        pid=stall.pid or "",
        op=stall.op,
        peer=stall.peer,
        cause=stall.cause,
        strength=stall.strength,
        blamed_rank=stall.blamed_rank,
        blamed_pid=stall.blamed_pid or "",
        rail=stall.rail,
        device=stall.device,
        **evidence,
    )


def _select_rows(rows: Rows, field: str, value: int) -> Rows:
    chosen: Rows = rows[rows[field] == value]
    return chosen


def _link_state(link: Rows) -> str:
    if not link["present"]:
        return "gone"
    if link["up"] == 0:
        return "down"
    if link["carrier"] == 0:
        return "no carrier"
    if link["up"] == NOT_KNOWN and link["carrier"] == NOT_KNOWN:
        return "state not known"
    speed = int(link["speed_bytes_per_second"])
    return f"up, {speed / 125e6:g} Gb/s" if speed > 0 else "up"


def _rates(times_ns: Rows, total_bytes: Rows) -> Iterator[tuple[int, float]]:
    """When a counter's rate changed, and to what; where it fell its device began anew, and nothing is known."""
    took_ns, moved = np.diff(times_ns), np.diff(total_bytes)
    sensible = took_ns > 0
    took_ns, moved, begins = took_ns[sensible], moved[sensible], times_ns[:-1][sensible]
    rates = np.where(moved >= 0, moved * 1e9 / took_ns, 0.0)
    changed = np.ones(len(rates), bool)
    changed[1:] = rates[1:] != rates[:-1]
    yield from zip(begins[changed].tolist(), rates[changed].tolist(), strict=True)
    yield int(times_ns[-1]), 0.0
