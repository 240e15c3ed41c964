"""Timelines from folders of recorded datasets, of ours or imported ones.

A dataset may be larger than memory, so only what lies in the wanted window is read, and too much is refused.  A
dataset does not say whose clocks are the same, nor what was under way when it ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from railscope.agent.dataset.reader import Dataset
from railscope.agent.recording.file import RecordingError
from railscope.agent.recording.recording import RecordedStall
from railscope.agent.trace.timeline import (
    CALL,
    COMPUTE,
    LINK_EVENT,
    NOT_KNOWN,
    OPERATION,
    RAIL_SAMPLE,
    HostTimeline,
    Rows,
    TimelineCommunicator,
    TimelineMark,
    TimelineRail,
    Words,
    cut_timeline,
    unnamed_communicator,
)

_OURS: Final = "railscope"
_MOST_ROWS: Final = 10_000_000
"""Of one table: what a viewer in a browser can hold is less."""

_WORDS: Final = frozenset({"op", "data_type", "algorithm", "protocol", "source", "name"})
_Row = Mapping[str, Any]


class DatasetTimelines:
    """One dataset; the methods are those of a source of `railscope.agent.trace.command`."""

    def __init__(self, dataset: Dataset, source: str) -> None:
        """`source`: what the dataset is called.

        Raises:
            DatasetError: a file of it cannot be read.
        """
        self._dataset = dataset
        self._source = source
        self._recordings = _by_recording(self._all("recordings"))
        self._communicators = _by_recording(self._all("communicators"))

    def window(self) -> tuple[int, int] | None:
        """First and last moment of what was recorded, time of day in ns; None: nothing was."""
        windows = [self._window(rows) for rows in self._recordings.values()]
        return (min(began for began, _ in windows), max(ended for _, ended in windows)) if windows else None

    def _window(self, rows: Sequence[_Row]) -> tuple[int, int]:
        """The window of one recording, which may have reported its progress more than once."""
        began = [row["began_ns"] for row in rows if row["began_ns"] is not None]
        ended = [row["ended_ns"] for row in rows if row["ended_ns"] is not None]
        if not began or not ended:
            raise RecordingError(f"{self._source}: it has no begin and end: a trace needs times")
        if min(began) < 0:
            raise RecordingError(f"{self._source}: it has times before 1970, which a trace cannot have")
        return min(began), max(ended)

    def comms(self) -> set[str]:
        """Communicators that were recorded by name."""
        return {row["comm"] for rows in self._communicators.values() for row in rows if row["comm"]}

    def hosts(self, from_ns: int, until_ns: int, comms: Sequence[str]) -> tuple[HostTimeline, ...]:
        """What lies between two moments; with `comms`, of these communicators.

        Raises:
            RecordingError: that is more than a viewer can show.
            DatasetError: a file cannot be read.
        """
        made = []
        for recording, rows in self._recordings.items():
            began_ns, ended_ns = self._window(rows)
            if began_ns <= until_ns and ended_ns >= from_ns:
                host = self._host(recording, rows, max(began_ns, from_ns), min(ended_ns, until_ns), comms)
                made.append(cut_timeline(host, from_ns, until_ns, comms))
        return tuple(sorted(made, key=lambda host: (host.host, host.began_ns)))

    def _host(
        self, recording: int, rows: Sequence[_Row], from_ns: int, until_ns: int, comms: Sequence[str]
    ) -> HostTimeline:
        row = rows[-1]
        words = Words()
        known = {
            one["instance"]: _communicator(one, row["source"]) for one in self._communicators.get(recording, ())
        }  # what was said last of each
        instances = [one.instance for one in known.values() if one.comm in comms] if comms else None
        rails = self._read_rows("rails", recording)
        window = (from_ns, until_ns)
        errors = [one["clock_error_ns"] for one in rows]
        calls = self._rows("calls", CALL, recording, words, window, instances)
        operations = self._rows("operations", OPERATION, recording, words, window, instances)
        for instance in np.unique(np.concatenate((calls["instance"], operations["instance"]))).tolist():
            known.setdefault(instance, unnamed_communicator(instance, 0))
        return HostTimeline(
            host=row["node"] or "unknown",
            source=self._source,
            recorder=f"{row['source'] or 'unknown'} {row['railscope'] or ''}".strip(),
            kernel=row["kernel"] or "",
            reason="",
            simulated=bool(row["simulated"]),
            clock="",
            error_ns=None if None in errors else max(errors),
            began_ns=self._window(rows)[0],
            ended_ns=self._window(rows)[1],
            missing=tuple(_missing(rows)),
            communicators=tuple(known.values()),
            rails=tuple(map(_rail, {one["rail_id"]: one for one in rails}.values())),
            marks=tuple(TimelineMark(one["time_ns"], one["text"], None) for one in self._read_rows("marks", recording)),
            stalls=tuple(map(_stall, self._read_rows("stalls", recording))),
            calls=calls,
            operations=operations,
            tells_unfinished=False,
            compute=self._rows("compute", COMPUTE, recording, words, window, [] if comms else None),
            rail_samples=_by_rail(self._rows("rail_samples", RAIL_SAMPLE, recording, words, window, None)),
            # What a link was when the window began was found out before.
            link_events=_by_rail(self._rows("link_events", LINK_EVENT, recording, words, (0, until_ns), None)),
            words=words.as_tuple(),
        )

    def _all(self, table: str) -> list[_Row]:
        rows: list[_Row] = self._dataset.rows(self._dataset[table]).to_pylist()
        return rows

    def _read_rows(self, table: str, recording: int) -> list[_Row]:
        expression = self._dataset[table]
        rows: list[_Row] = self._dataset.rows(expression.filter(expression.recording == recording)).to_pylist()
        return rows

    def _rows(
        self,
        table: str,
        dtype: np.dtype[Any],
        recording: int,
        words: Words,
        window: tuple[int, int],
        instances: Sequence[int] | None,
    ) -> Rows:
        """The rows of a table in a window as a numpy array; `instances`: of these communicators only."""
        if instances is not None and not instances:
            return np.empty(0, dtype)
        one = self._dataset[table]
        begin, end = (one.time_ns, one.time_ns) if "time_ns" in one.columns else (one.begin_ns, one.end_ns)
        wanted = (one.recording == recording) & (begin <= window[1]) & (end >= window[0])
        if instances is not None:
            wanted &= one.instance.isin(instances)
        chosen = one.filter(wanted)
        if table == "operations":
            # As in a recording's file: what waits behind others on its communicator is under way, too.
            chosen = chosen.mutate(begin_ns=chosen.handed_over_ns.fill_null(chosen.begin_ns))
        elif "rail_id" in one.columns:
            chosen = chosen.rename(rail="rail_id")
        count = self._dataset.rows(chosen.aggregate(rows=chosen.count()))["rows"][0].as_py()
        if count > _MOST_ROWS:
            raise RecordingError(
                f"{self._source}: {count:,} {table.replace('_', ' ')} are more than a viewer can show: "
                "choose a shorter time with --from and --seconds, or a communicator with --comm"
            )
        found = self._dataset.rows(chosen.select(*(dtype.names or ())))
        rows = np.empty(len(found), dtype)
        for name in dtype.names or ():
            rows[name] = _places(found[name], words) if name in _WORDS else _numbers(found[name])
        return rows


def _by_recording(rows: Iterable[_Row]) -> dict[int, list[_Row]]:
    found: defaultdict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        found[row["recording"]].append(row)
    return found


def _missing(rows: Sequence[_Row]) -> Iterable[str]:
    for kind, field in (("calls", "calls_lost"), ("operations", "operations_lost")):
        lost = [row[field] for row in rows]
        if None in lost:
            yield f"it is unknown whether {kind} were lost"
        elif any(lost):
            yield f"{sum(lost):,} {kind} were lost: they were seen and not recorded"
    for kind, field in (("calls", "calls_removed"), ("operations", "operations_removed")):
        removed = sum(row[field] or 0 for row in rows)
        if removed:
            yield f"{removed:,} {kind} were removed to keep the folder small"
    if any(row["times_known"] is False for row in rows):
        yield "times were not recorded: these give only the order"


def _communicator(row: _Row, source: str | None) -> TimelineCommunicator:
    def text(name: str) -> str:
        return "" if row[name] is None else str(row[name])

    numbered = row["numbered_from_start"]
    if numbered is None and source != _OURS:
        # What NCCL or a framework numbers itself begins at the same call everywhere; we begin when we come.
        numbered = True
    return TimelineCommunicator(
        instance=row["instance"],
        comm=text("comm"),
        rank=text("rank"),
        nranks=text("nranks"),
        pid=row["pid"] or 0,
        gpu=text("gpu"),
        netns=text("netns"),
        job=text("job"),
        world_rank=text("world_rank"),
        numbered_from_start=numbered,
    )


def _rail(row: _Row) -> TimelineRail:
    return TimelineRail(
        row["rail_id"], row["rail"] or "", row["device"] or "", row["netns"] or "", row["speed_bytes_per_second"]
    )


def _stall(row: _Row) -> RecordedStall:
    def text(name: str) -> str:
        return "" if row[name] is None else str(row[name])

    return RecordedStall(
        comm=text("comm"),
        rank=text("rank"),
        nranks="",
        pid=row["pid"] or 0,
        op=text("op"),
        peer=text("peer"),
        cause=text("cause"),
        strength=text("strength"),
        since_realtime_ns=row["since_ns"],
        seconds=row["seconds"] or 0.0,
        blamed_rank=text("blamed_rank"),
        blamed_pid=row["blamed_pid"] or 0,
        rail=text("rail"),
        device=text("device"),
        evidence=tuple(text("evidence").splitlines()),
    )


def _numbers(column: pa.ChunkedArray) -> Rows:
    numbers: Rows = pc.fill_null(column.cast(pa.int64()), NOT_KNOWN).to_numpy()
    return numbers


def _places(column: pa.ChunkedArray, words: Words) -> Rows:
    """Places of the words in a column of texts."""
    coded = column.combine_chunks().cast(pa.string()).dictionary_encode()
    table = np.array([*map(words.index_of, coded.dictionary.to_pylist()), NOT_KNOWN], np.int64)
    places: Rows = table[pc.fill_null(coded.indices, len(table) - 1).to_numpy(zero_copy_only=False)]
    return places


def _by_rail(rows: Rows) -> Rows:
    ordered: Rows = rows[np.lexsort((rows["time_ns"], rows["rail"]))]
    return ordered
