"""Writes what one host records into a dataset, piece by piece; the folder is readable at any time.

Events are written once, as parts.  What says who is who (communicators, rails, connections), stalls, which go on, and
the row of the recording itself are renewed: their file is written anew, and takes the old one's place.  They come
before the events that name them, the row of the recording comes last.

A piece that could not be written may be given again: it has the same part number, and takes the place of what there
is of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from railscope.agent.dataset.conversion import (
    DayTimes,
    calls_table,
    connection_keys,
    link_events_table,
    operations_table,
    rail_samples_table,
)
from railscope.agent.dataset.files import HOUR_NS
from railscope.agent.dataset.schema import SCHEMA_VERSION
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.facts.hardware import NeighbourFacts
from railscope.agent.facts.label_numbers import UNKNOWN, parse_number
from railscope.agent.facts.transfers import PeerTransfers
from railscope.agent.recording.recording import RecordedCommunicator, RecordedRail, RecordedStall, Recording

EVENT_TABLES: Final = ("calls", "operations", "rail_samples", "link_events", "marks")
"""Tables that are written in parts, by name; their moment is `time_ns`, of operations `end_ns`."""
_MOST_RENEWED_ROWS: Final = 4096
_CONVERTERS: Final = {
    "calls": ("calls", calls_table),
    "operations": ("completions", operations_table),
    "rail_samples": ("rail_samples", rail_samples_table),
    "link_events": ("link_events", link_events_table),
}
"""Table, the kind of events it holds, and how they become its rows."""

StallKey = Any
"""Tells one stall of a recording from another; can be hashed."""


@dataclass(frozen=True, slots=True)
class RecordingRow:
    """The row of `recordings`; the columns' meaning stands in `schema`."""

    railscope: str | None
    kernel: str | None
    simulated: bool | None
    began_ns: int
    ended_ns: int
    clock_error_ns: int | None
    calls_lost: int | None = 0
    operations_lost: int | None = 0
    calls_removed: int = 0
    operations_removed: int = 0
    schema_version: int = SCHEMA_VERSION
    source: str = "railscope"
    compute_recorded: bool = False


@dataclass(frozen=True, slots=True)
class Losses:
    """Events of one piece that were lost; None: some, number unknown."""

    calls: int | None
    operations: int | None


class RecordingWriter:
    """For one thread."""

    def __init__(self, writer: DatasetWriter, row: RecordingRow) -> None:
        """Write a recording without events; `row` says when it began, and of which host it is.

        Raises:
            OSError: it cannot be written.
        """
        self._writer = writer
        self._row = row
        self._began = False
        self._parts = 0
        self._numbered: dict[int, bool] = {}
        """By instance: whether its calls are numbered from its first one on, where a piece so far tells."""
        self.rows: dict[str, int] = {}
        """Rows written so far, by table of events."""
        # Of the hour in which it began, also where the first piece says that it began a moment earlier.
        self._recordings, self._communicators, self._rails, self._connections, self._stalls = (
            _Renewed(writer, table, row.began_ns)
            for table in ("recordings", "communicators", "rails", "connections", "stalls")
        )
        self._transfers = _Renewed(writer, "transfers", row.began_ns)
        self._owners = _Renewed(writer, "rail_owners", row.began_ns)
        self._ledgers: dict[int, tuple[int, int]] = {}
        """By rail: how many ledgers it had before this one, and what this one has."""
        self._renew_row(row)

    def begin(self, began_ns: int, clock_error_ns: int | None) -> None:
        """What is given from now on was seen by an agent that was ready at this time of day; call before `add`.

        Without it a recording begins with its first piece.

        Raises:
            OSError: the row cannot be written.
        """
        self._renew_row(replace(self._row, began_ns=began_ns, ended_ns=began_ns, clock_error_ns=clock_error_ns))
        self._began = True

    @property
    def row(self) -> RecordingRow:
        """The recording's row."""
        return self._row

    @property
    def writer(self) -> DatasetWriter:
        return self._writer

    @property
    def communicators(self) -> int:
        """Ends of communicators so far."""
        return len(self._communicators)

    def add(
        self,
        piece: Recording,
        losses: Losses,
        stalls: Mapping[StallKey, RecordedStall],
        transfers: Mapping[Hashable, Sequence[PeerTransfers]] = MappingProxyType({}),
        neighbours: Sequence[NeighbourFacts] = (),
    ) -> list[tuple[str, Path]]:
        """Write one piece, which begins where the one before ended; returns the files of events with their tables.

        `stalls` and `transfers` are as they stand now: what earlier pieces had of the same keys gives way.
        `neighbours` are the switches that rails have heard by now.

        Raises:
            OSError: it cannot be written; it may be given again.
        """
        part = self._parts + 1
        for instance, numbered in piece.numbered_from_start().items():
            self._numbered[instance] = numbered or self._numbered.get(instance, False)
        for communicator in piece.communicators:
            self._communicators.put(
                communicator.instance, _communicator(communicator, self._numbered.get(communicator.instance))
            )
        for rail in piece.rails:
            self._rails.put(rail.device, _rail(rail, _neighbour_of(rail, neighbours)))
            if rail.owners:
                self._put_owners(rail)
        for key in connection_keys(piece.connections):
            names = ("instance", "peer", "channel", "send", "net_device")
            self._connections.put(key, dict(zip(names, key, strict=True)))
        for which, stall in stalls.items():
            self._stalls.put(which, _stall(stall))
        for which, pairs in transfers.items():
            self._transfers.put(which, *map(_transfers, pairs))
        tables = (self._communicators, self._rails, self._owners, self._connections, self._stalls, self._transfers)
        for renewed in tables:
            renewed.write()
        events = dict(self._events(piece))
        files = [(table, path) for table, rows in events.items() for path in self._write_events(table, rows, part)]
        errors = [piece.realtime_error_ns(), *([self._row.clock_error_ns] if self._began else [])]
        known = [error for error in errors if error is not None]
        self._renew_row(
            replace(
                self._row,
                railscope=piece.railscope or None,
                kernel=piece.kernel or None,
                simulated=piece.simulated,
                began_ns=self._began_ns(piece),
                ended_ns=piece.realtime_ns(piece.ended_ns),
                clock_error_ns=max(known) if len(known) == len(errors) else None,
                calls_lost=_sum(self._row.calls_lost, losses.calls),
                operations_lost=_sum(self._row.operations_lost, losses.operations),
            )
        )
        self._parts, self._began = part, True
        for table, rows in events.items():
            self.rows[table] = self.rows.get(table, 0) + len(rows)
        return files

    def record_removed(self, calls: int, operations: int, until_ns: int) -> None:
        """Events of this recording, up to a time of day, are about to be removed.

        Raises:
            OSError: the row cannot be written.
        """
        row = self._row
        self._renew_row(
            replace(
                row,
                began_ns=max(row.began_ns, until_ns),
                calls_removed=row.calls_removed + calls,
                operations_removed=row.operations_removed + operations,
            )
        )

    def _put_owners(self, rail: RecordedRail) -> None:
        """The rows of a rail; where its ledger began anew, what it had stays beside what it has since."""
        ledgers, before = self._ledgers.get(rail.device, (0, 0))
        together = sum(one.port_bytes for one in rail.owners)
        ledgers += together < before
        self._ledgers[rail.device] = ledgers, together
        rows = ({"rail_id": rail.device, **asdict(one)} for one in rail.owners)
        self._owners.put((rail.device, ledgers), *rows)

    def _began_ns(self, piece: Recording) -> int:
        """Time of day at which the recording began, as it is known with this piece."""
        if not self._began:
            return piece.realtime_ns(piece.began_ns)
        if self._parts or not len(piece.calls):
            return self._row.began_ns
        # While the agent was attaching to the last processes, the first ones made calls already.
        return min(self._row.began_ns, piece.realtime_ns(int(piece.calls["time_ns"].min())))

    def _renew_row(self, row: RecordingRow) -> None:
        self._recordings.put(None, asdict(row))
        self._recordings.write()
        self._row = row

    def _events(self, piece: Recording) -> Iterator[tuple[str, pa.Table]]:
        times, node = DayTimes(piece.clocks), self._writer.node
        for table, (kind, converted) in _CONVERTERS.items():
            if len(piece.arrays[kind]):
                yield table, converted(self._writer.recording, node, times, piece.arrays[kind])
        if piece.marks:
            marks = [{"time_ns": piece.realtime_ns(mark.time_ns), "text": _utf8(mark.text)} for mark in piece.marks]
            yield "marks", self._writer.make_table("marks", marks)

    def _write_events(self, table: str, rows: pa.Table, part: int) -> list[Path]:
        hours = rows["end_ns" if table == "operations" else "time_ns"].to_numpy() // HOUR_NS
        first = int(hours[0])
        if (hours == first).all():
            return [self._writer.write_part(table, rows, first * HOUR_NS, part)]
        return [
            self._writer.write_part(table, rows.filter(pa.array(hours == hour)), hour * HOUR_NS, part)
            for hour in np.unique(hours).tolist()
        ]


class _Renewed:
    """A small table that changes: rewritten whenever it has changed, or its file is missing.

    Once a few thousand rows are no longer put, a file has these, and is not rewritten any more; the others, which may
    still change, go on in another one.
    """

    def __init__(self, writer: DatasetWriter, table: str, hour_ns: int) -> None:
        self._writer = writer
        self._table = table
        self._hour_ns = hour_ns
        self._file = 1
        self._rows: dict[Hashable, tuple[dict[str, Any], ...]] = {}
        self._before: set[Hashable] = set()
        """What the files before this one hold."""
        self._lasting: set[Hashable] = set()
        """What was put since the last writing."""
        self._changed = False
        self._path: Path | None = None
        """Where the rows are; None: there are none."""

    def __len__(self) -> int:
        return len(self._before) + len(self._rows)

    def put(self, key: Hashable, *rows: dict[str, Any]) -> None:
        """All rows of a key, or what has become of them."""
        made = tuple(
            {column: _utf8(value) if isinstance(value, str) else value for column, value in row.items()} for row in rows
        )
        self._lasting.add(key)
        if key not in self._before and self._rows.get(key) != made:
            self._rows[key] = made
            self._changed = True

    def write(self) -> None:
        over = [key for key in self._rows if key not in self._lasting]
        if sum(len(self._rows[key]) for key in over) >= _MOST_RENEWED_ROWS:
            self._write_rows({key: self._rows[key] for key in over})
            self._file += 1
            self._before.update(over)
            self._rows = {key: row for key, row in self._rows.items() if key in self._lasting}
            self._path, self._changed = None, bool(self._rows)
        if self._changed or (self._path is not None and not self._path.exists()):
            self._write_rows(self._rows)
            self._changed = False
        self._lasting.clear()

    def _write_rows(self, rows: Mapping[Hashable, tuple[dict[str, Any], ...]]) -> None:
        table = self._writer.make_table(self._table, list(chain.from_iterable(rows.values())))
        self._path = self._writer.write_part(self._table, table, self._hour_ns, self._file)


def _sum(so_far: int | None, more: int | None) -> int | None:
    return None if so_far is None or more is None else so_far + more


def _communicator(one: RecordedCommunicator, numbered_from_start: bool | None) -> dict[str, Any]:
    identity = one.identity
    return {
        "instance": one.instance,
        "comm": _text_or_none(identity.comm),
        "rank": parse_number(identity.rank),
        "nranks": parse_number(identity.nranks),
        "local_ranks": parse_number(identity.local_ranks),
        "node_rank": parse_number(identity.node_rank),
        "pid": identity.pid,
        "netns": _text_or_none(identity.netns),
        "gpu": _text_or_none(identity.gpu),
        "world_rank": parse_number(identity.of_job("world_rank")),
        "job": _text_or_none(identity.of_job("job")),
        "nccl_version": _text_or_none(identity.nccl_version),
        "numbered_from_start": numbered_from_start,
    }


def _neighbour_of(rail: RecordedRail, neighbours: Sequence[NeighbourFacts]) -> NeighbourFacts | None:
    """The switch at a rail's other end: heard on its own network device, or on that of an RDMA port's rail."""
    if rail.netns:
        return None
    own = [one for one in neighbours if one.device == rail.name]
    found = own or [one for one in neighbours if rail.rail and one.rail == rail.rail and "/" in rail.name]
    return found[0] if len(found) == 1 else None


def _rail(rail: RecordedRail, neighbour: NeighbourFacts | None) -> dict[str, Any]:
    return {
        "rail_id": rail.device,
        "rail": _text_or_none(rail.rail),
        "device": _text_or_none(rail.name),
        "netns": _text_or_none(rail.netns),
        "pci": _text_or_none(rail.pci),
        "driver": _text_or_none(rail.driver),
        "speed_bytes_per_second": rail.speed_bytes_per_second,
        "switch": None if neighbour is None else _text_or_none(neighbour.switch),
        "switch_port": None if neighbour is None else _text_or_none(neighbour.port),
    }


def _transfers(pair: PeerTransfers) -> dict[str, Any]:
    return {
        "pid": pair.pid,
        "netns": _text_or_none(pair.netns),
        "library": pair.library,
        "op": pair.op,
        "direction": pair.direction,
        "peer": pair.peer or None,
        "operations": pair.operations,
        "payload_bytes": pair.payload_bytes,
        "completed": pair.completed,
        "failed": pair.failed,
        "seconds": pair.seconds,
        "p50_seconds": None if pair.durations is None else pair.durations.quantile(0.5),
        "p99_seconds": None if pair.durations is None else pair.durations.quantile(0.99),
    }


def _stall(stall: RecordedStall) -> dict[str, Any]:
    return {
        "comm": _text_or_none(stall.comm),
        "rank": parse_number(stall.rank),
        "pid": stall.pid or None,
        "op": _text_or_none(stall.op),
        "peer": _text_or_none(stall.peer),
        "cause": _text_or_none(stall.cause),
        "strength": _text_or_none(stall.strength),
        "since_ns": stall.since_realtime_ns,
        "seconds": stall.seconds,
        "blamed_rank": parse_number(stall.blamed_rank),
        "blamed_pid": stall.blamed_pid or None,
        "rail": _text_or_none(stall.rail),
        "device": _text_or_none(stall.device),
        "evidence": "\n".join(stall.evidence) or None,
    }


def _utf8(text: str) -> str:
    """Names of the system are any bytes; of those that are no UTF-8 Python makes what no file of ours can hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _text_or_none(text: str) -> str | None:
    return None if text in ("", UNKNOWN) else text
