"""What tests of writing datasets share: a host's seconds (simulated), and a folder's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.recording_writer import Losses, RecordingRow
from railscope.agent.dataset.writer import read_part
from railscope.agent.facts.clocks import ClockReading
from railscope.agent.recording.recording import KINDS, Recording
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, recording, records

NO_LOSSES = Losses(0, 0)
ROW = RecordingRow("1.2.3", "6.6.1", None, BEGAN_NS + REALTIME_NS, BEGAN_NS + REALTIME_NS, None)


def piece(number: int, calls: int = 10) -> Recording:
    """A second of a host; its calls are numbered on from those of the piece before."""
    began_ns = BEGAN_NS + number * SECOND_NS
    events = records("calls", calls, instance=7, sequence=1 + number * calls + np.arange(calls))
    events["time_ns"] = began_ns + np.arange(calls) * 1000
    clock = ClockReading(began_ns, began_ns + REALTIME_NS, 100, True, 1_000_000 + number, None)
    empty = {kind: records(kind, 0) for kind in KINDS}
    return replace(
        recording("record"), began_ns=began_ns, ended_ns=began_ns + SECOND_NS, clocks=(clock,), marks=(),
        arrays=empty | {"calls": events},
    )  # fmt: skip


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    return [row for file in table_files(folder, table) for row in read_part(file, table).to_pylist()]


def sequences(folder: Path) -> list[int]:
    return sorted(row["sequence"] for row in read(folder, "calls"))


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.parquet"))
