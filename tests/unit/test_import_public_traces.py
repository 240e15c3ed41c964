"""Traces in the forms that public collections of them have, held against a small parser that knows nothing of ours.

`RAILSCOPE_TRACES=FOLDER` names a folder with such files, which are not part of this repository: the tests of
HolisticTraceAnalysis and of TraceLens have some dozens.  Without it the same forms are made here: microseconds as whole
numbers without a base (PyTorch before 2.2), categories of PyTorch before 1.12, ROCm's, no object around the events,
collectives without arguments, and traces of the host alone.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from railscope.agent.imports.facts import ImportFailure
from railscope.agent.imports.kineto import NO_CALL_ARGUMENTS, NO_GPU
from tests.unit.importing import imported, written

_FOLDER: Final = os.environ.get("RAILSCOPE_TRACES", "")
_ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
Event = dict[str, Any]


class Work(NamedTuple):
    """What the GPUs of a trace did."""

    pieces: int
    nanoseconds: int
    nccl: int
    """Kernels of NCCL's."""


def work_of(path: Path) -> Work:
    """What a trace says, read whole."""
    content = path.read_bytes()
    said = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content, strict=False)
    events = said if isinstance(said, list) else said.get("traceEvents", [])
    done = [one for one in events if one.get("ph") == "X" and str(one.get("cat")).lower() in _ON_GPU]
    nccl = [one for one in done if "nccl" in str(one["name"]).lower() and str(one["cat"]).lower() == "kernel"]
    return Work(len(done), sum(round(float(one.get("dur", 0)) * 1000) for one in done), len(nccl))


def check(folder: Path, path: Path) -> None:
    """Import a trace and hold it against the other parser."""
    expected = work_of(path)
    if not expected.pieces:
        with pytest.raises(ImportFailure, match="no calls and no operations") as failure:
            imported(folder, path, chosen="kineto")
        assert "no events of a GPU" in str(failure.value) or NO_CALL_ARGUMENTS in str(failure.value)
        return
    result = imported(folder, path)
    rows = [*result.rows("operations"), *result.rows("compute")]
    found = Work(len(rows), sum(row["end_ns"] - row["begin_ns"] for row in rows), len(result.rows("operations")))
    assert found[:2] == expected[:2]
    # Others communicate as well.
    assert found.nccl >= expected.nccl
    assert result.imported.problems.count == 0


def kernel(name: str, category: str, begin: float, length: float, **arguments: object) -> Event:
    said = {"device": 0, "stream": 7, **arguments}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": length, "args": said}


def events(kernels: str = "kernel", copies: str = "gpu_memcpy", *, whole: bool = False) -> list[Event]:
    """Host and GPU of a step that computes, copies and communicates."""
    unit = 1 if whole else 1.125
    host = {"ph": "X", "cat": "cpu_op", "pid": 9, "tid": 9}
    return [
        {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}},
        {**host, "name": "aten::mm", "ts": 5 * unit, "dur": 3 * unit, "args": {"External id": 1}},
        {**host, "name": "record_param_comms", "ts": 9 * unit, "dur": 2 * unit, "args": {"External id": 2}},
        kernel("ampere_sgemm_128x64_tn", kernels, 20 * unit, 40 * unit, correlation=1),
        kernel("Memcpy HtoD (Pinned -> Device)", copies, 61 * unit, 4 * unit, bytes=4096),
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", kernels, 70 * unit, 15 * unit),
    ]


SHAPES: Final[dict[str, Any]] = {
    "whole microseconds without a base": {"schemaVersion": 1, "traceEvents": events(whole=True)},
    "nanoseconds with a base": {"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events()},
    "categories of PyTorch before 1.12": {"traceEvents": events("Kernel", "Memcpy", whole=True)},
    "events alone": events(),
    "no GPU": {"traceEvents": [one for one in events() if one.get("cat") == "cpu_op"]},
    "another accelerator": {"traceEvents": [{**kernel("matmul", "mtia_ccp_events", 1, 2)}]},
    "nothing but the host's operators": {"traceEvents": [events()[1]]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_trace_is_imported_as_it_says(tmp_path: Path, shape: str) -> None:
    check(tmp_path, written(tmp_path, "trace.json", json.dumps(SHAPES[shape], indent=1)))


def test_what_has_no_gpu_says_so(tmp_path: Path) -> None:
    trace = written(tmp_path, "trace.json", json.dumps(SHAPES["another accelerator"]))
    with pytest.raises(ImportFailure, match=NO_GPU):
        imported(tmp_path, trace)


@pytest.mark.skipif(not _FOLDER, reason="RAILSCOPE_TRACES names no folder with traces of others")
def test_traces_of_others_are_imported_as_they_say(tmp_path: Path) -> None:
    files = [file for file in sorted(Path(_FOLDER).rglob("*.json*")) if file.is_file()]
    assert files
    for number, file in enumerate(files):
        check(tmp_path / str(number), file)
