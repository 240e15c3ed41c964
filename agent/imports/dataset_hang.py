"""What a recorded dataset (`railscope record -o DIR`) tells of a job that hangs: the stalls that its agents called so.

A stall counts that was on when its recording ended, also where its processes ended before.  How far ranks came is not
compared: a folder holds what was recorded of a while, and the agents compared ranks when they called it a stall.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from railscope.agent.cluster.fleet.dumps import Dumps
from railscope.agent.cluster.fleet.facts import Rank, Stall, StuckTransfer
from railscope.agent.cluster.verdict.quantities import format_duration
from railscope.agent.dataset.files import DatasetError, table_files
from railscope.agent.facts.causes import Cause, is_well_founded
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.imports.facts import Problems, printable
from railscope.agent.imports.recording_hang import make_stuck_transfer, nameless_rank, ranks_without_recording

_OWN: Final = "railscope"
_ON_SECONDS: Final = 5.0
"""A stall that ended so shortly before its recording was on."""
_MOST_NOTES: Final = 8
_MOST_ROWS: Final = 1 << 18
"""Of one file: ends of communicators or stalls of an hour.  Rows that are null take a file next to nothing."""
_Row = Mapping[str, Any]


def is_dataset(folder: Path) -> bool:
    """Whether a folder holds a recorded or imported dataset."""
    return folder.is_dir() and bool(table_files(folder, "recordings"))


def read_hang_dataset(folder: Path, problems: Problems) -> Dumps:
    """What the recordings in a dataset's folder tell together.

    Raises:
        DatasetError: its tables cannot be read.
    """
    recordings = {row["recording"]: row for row in _rows(folder, "recordings")}
    imported = sorted({str(row["source"]) for row in recordings.values() if row["source"] != _OWN})
    if imported:
        problems.count_skipped(
            str(folder), 0, f"what was imported ({', '.join(imported)}) holds no stalls: give the files themselves"
        )
    own = {number: row for number, row in recordings.items() if row["source"] == _OWN}
    stalls: dict[tuple[int, str, int | None], _Row] = {}
    nameless: dict[tuple[int, int | None], _Row] = {}
    """Of no communicator that is known, by recording and process."""
    transfers: list[StuckTransfer] = []
    notes: list[str] = []
    for row in _rows(folder, "stalls"):
        recording = own.get(row["recording"])
        if recording is None:
            continue
        ended = (row["since_ns"] or 0) / 1e9 + (row["seconds"] or 0.0)
        before = (recording["ended_ns"] or 0) / 1e9 - ended
        if before > _ON_SECONDS:
            notes.append(
                f"{row['node']}: a stall of {row['comm']} ended {format_duration(before)} before the recording"
            )
        elif (stuck := _stuck_transfer(row)) is not None:
            transfers.append(stuck)
        else:
            if row["comm"] is None:
                nameless[row["recording"], row["pid"]] = row
            else:
                stalls[row["recording"], row["comm"], row["rank"]] = row
            notes += [f"{row['node']}: {line}" for line in (row["evidence"] or "").splitlines()]
    founded = {row["comm"] for row in stalls.values() if is_well_founded(row["cause"] or Cause.UNKNOWN)}
    for which, row in stalls.items():
        if row["comm"] in founded and row["cause"] == Cause.PROCESS_GONE:
            # A job that hangs for a reason that a host saw is killed in the end.
            stalls[which] = {**row, "cause": None, "blamed_rank": None}
    ranks = [
        _rank(row, stalls.get((row["recording"], row["comm"], row["rank"])))
        for row in _rows(folder, "communicators")
        if row["recording"] in own and row["comm"]
    ]
    ranks += [
        nameless_rank(row["node"], row["pid"] or 0, _stall(row), row["seconds"] or 0.0) for row in nameless.values()
    ]
    return Dumps(
        at=max((row["ended_ns"] or 0 for row in own.values()), default=0) / 1e9,
        ranks=tuple(ranks),
        told=(f"{format_count(len(own), 'recording')} of {folder}",),
        lacking=tuple(ranks_without_recording(ranks)),
        open=()
        if stalls or nameless or transfers
        else ("a recording that was made of no stall may be shorter than a stall takes to be called so",),
        tells_completion=False,
        notes=tuple(printable(note) for note in dict.fromkeys(notes))[:_MOST_NOTES],
        stuck_transfers=tuple(sorted(transfers, key=lambda one: -one.seconds)),
    )


def _stuck_transfer(row: _Row) -> StuckTransfer | None:
    """None: it is a stall of a communicator."""
    if row["comm"] is not None:
        return None
    return make_stuck_transfer(
        host=row["node"],
        op=row["op"] or "",
        pid=row["pid"] or 0,
        peer=row["peer"] or "",
        cause=row["cause"] or Cause.UNKNOWN,
        blamed_pid=row["blamed_pid"] or 0,
        seconds=row["seconds"] or 0.0,
        evidence=(row["evidence"] or "").splitlines(),
    )


def _rows(folder: Path, table: str) -> Iterable[_Row]:
    # Imports pyarrow, of which files of no dataset have no need.
    from railscope.agent.dataset.writer import read_part

    for file in table_files(folder, table):
        try:
            yield from read_part(file, table, most_rows=_MOST_ROWS).to_pylist()
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
            raise DatasetError(f"{file}: cannot be read: {reason}") from None


def _rank(row: _Row, stall: _Row | None) -> Rank:
    said = {name: str(row[name]) for name in ("nranks", "gpu", "nccl_version", "pid") if row[name] is not None}
    job = tuple((name, str(row[name])) for name in ("job", "world_rank") if row[name] is not None)
    number = "unknown" if row["rank"] is None else str(row["rank"])
    return Rank(
        rank_identity_from_labels(row["comm"], number, said, job),
        host=row["node"],
        stall=None if stall is None else _stall(stall),
        stalled_seconds=None if stall is None else stall["seconds"],
    )


def _stall(row: _Row) -> Stall:
    return Stall(
        row["op"] or "",
        row["cause"] or "unknown",
        row["strength"] or "unknown",
        "" if row["blamed_rank"] is None else str(row["blamed_rank"]),
        row["rail"] or "",
        row["device"] or "",
    )
