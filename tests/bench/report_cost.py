"""What `railscope report` takes for one, three and ten million calls: time, and the most memory of its process.

The recordings are made up (simulated): a GPT-shaped job of 32 GPUs on four servers, pipeline 4 × tensor 2 × data 4,
whose iterations repeat with some jitter.  Calls of the pipeline and of gradients have their completed operation, as
NCCL's network threads show them; in one recording every call has one, as traces of the GPU have.  In the last ones
nearly every call has a size of its own, so that nothing can be put together.

`python -m tests.bench.report_cost DIR CALLS [timed] [varied]` only makes such a dataset.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from railscope.agent.dataset.schema import TABLES
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Mode, Shape
from railscope.agent.model.volumes import stage_volumes
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import Built

PART: Final = "report"
_MOST_CALLS: Final = 10_000_000
RECORDINGS: Final = (
    (1_000_000, False, False),
    (3_000_000, False, False),
    (_MOST_CALLS, False, False),
    (_MOST_CALLS, True, False),
    (3_000_000, False, True),
    (_MOST_CALLS, False, True),
)
"""Calls, whether every call has an operation, and whether nearly every call has another size."""
_SHAPE: Final = Shape(
    layers=54,
    hidden=2000,
    sequence=1024,
    vocabulary=50257,
    global_batch=1024,
    micro_batch=32,
    pipeline=4,
    tensor=2,
    data=4,
)
_GPUS_OF_A_SERVER: Final = 8
_BEGAN_NS: Final = 1_790_000_000_000_000_000
_PERIOD_NS: Final = 2_000_000_000
_ROWS_OF_A_FILE: Final = 1 << 19
_SEED: Final = 1
_OPS: Final = ("AllReduce", "Send", "Recv")
_SHORTEST_NS: Final = 800_000
"""What an operation inside a server takes."""
_LEAST_VARIED: Final = 1 << 10
_MOST_VARIED: Final = 1 << 29
"""Elements of two bytes."""
_MOST_SECONDS: Final = 60.0
_MOST_BYTES: Final = 4e9

_CALL: Final = np.dtype(
    [("offset_ns", "i8"), ("instance", "i8"), ("op", "i4"), ("payload", "i8"), ("peer", "i4"), ("took_ns", "i8")]
)
"""One call of an iteration; `took_ns` is 0 where no operation was seen."""


@dataclass(frozen=True, slots=True)
class _End:
    comm: str
    rank: int
    nranks: int
    gpu: int
    instance: int


def measure(_built: Built, rounds: int) -> list[Line]:
    """Make recordings of all sizes, and report on each `rounds` times in a process of its own."""
    lines: list[Line] = []
    for calls, timed, varied in RECORDINGS:
        with tempfile.TemporaryDirectory(prefix="railscope-bench-") as folder:
            made = write_recording(Path(folder), calls, timed=timed, varied=varied)
            runs = [_report(Path(folder)) for _ in range(rounds)]
        name = f"{made / 1e6:.1f} M calls{', all timed' if timed else ''}{', all different sizes' if varied else ''}"
        bound = calls == _MOST_CALLS
        note = "simulated recording, 32 GPUs"
        seconds, memory = [run[0] for run in runs], [run[1] / 1e9 for run in runs]
        limits = (Limit(Bound.BELOW, _MOST_SECONDS), Limit(Bound.BELOW, _MOST_BYTES / 1e9)) if bound else (None, None)
        lines.append(figure(PART, f"{name}: time", "s", seconds, target=limits[0], note=note))
        lines.append(figure(PART, f"{name}: memory", "GB", memory, target=limits[1], note=note))
    return lines


def _report(folder: Path) -> tuple[float, int]:
    """Seconds, and the most resident bytes, of one `railscope report`."""
    program = (
        "import sys; from argparse import ArgumentParser; "
        "from railscope.agent.analysis.report.command import run_report; "
        "from railscope.agent.analysis.facts.options import add_report_arguments; parser = ArgumentParser(); "
        "add_report_arguments(parser); sys.exit(run_report(parser.parse_args(), sys.stdout))"
    )
    began_s = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"railscope report ended with {child.returncode}")
    return time.perf_counter() - began_s, used.ru_maxrss * 1024


def write_recording(folder: Path, calls: int, *, timed: bool = False, varied: bool = False) -> int:
    """A dataset of at least so many calls, of whole iterations; returns how many there are.

    `timed`: every call has an operation; `varied`: every call has a size drawn from so many that hardly two are equal.
    """
    ends = list(_ends())
    by_gpu = {gpu: _iteration(gpu, ends) for gpu in range(_SHAPE.ranks)}
    of_iteration = sum(len(one) for one in by_gpu.values())
    iterations = -(-calls // of_iteration)
    random = np.random.default_rng(_SEED)
    for server in range(_SHAPE.ranks // _GPUS_OF_A_SERVER):
        gpus = range(server * _GPUS_OF_A_SERVER, (server + 1) * _GPUS_OF_A_SERVER)
        writer = DatasetWriter(folder, f"node-{server}")
        _describe(writer, [end for end in ends if end.gpu in gpus], iterations)
        once = np.sort(np.concatenate([by_gpu[gpu] for gpu in gpus]), order="offset_ns")
        at_a_time = max(_ROWS_OF_A_FILE // len(once), 1)
        for first in range(0, iterations, at_a_time):
            many = min(at_a_time, iterations - first)
            starts = _BEGAN_NS + _PERIOD_NS * np.arange(first, first + many)
            rows = np.tile(once, many)
            if varied:
                rows["payload"] = 2 * random.integers(_LEAST_VARIED, _MOST_VARIED, len(rows))
            times = np.repeat(starts, len(once)) + rows["offset_ns"] + random.integers(0, 50_000, len(rows))
            times.sort()
            writer.add("calls", _calls(writer, rows, times), int(times[0]))
            seen = (rows["took_ns"] > 0) | timed
            took = (np.maximum(rows["took_ns"][seen], _SHORTEST_NS) * random.gamma(8, 1 / 8, int(seen.sum()))).astype(
                np.int64
            )
            writer.add("operations", _operations(writer, rows[seen], times[seen], took), int(times[0]))
    return of_iteration * iterations


def _ends() -> Iterator[_End]:
    ranks = default_mapping(_SHAPE).ranks
    groups = {
        "world": [list(range(_SHAPE.ranks))],
        "tp": ranks.reshape(-1, _SHAPE.tensor).tolist(),
        "dp": ranks.transpose(0, 2, 1).reshape(-1, _SHAPE.data).tolist(),
        "pp": ranks.transpose(1, 2, 0).reshape(-1, _SHAPE.pipeline).tolist(),
        "emb": ranks[[0, -1]].transpose(1, 2, 0).reshape(-1, 2).tolist(),
    }
    instance = 0
    for kind, members in groups.items():
        for number, gpus in enumerate(members):
            for rank, gpu in enumerate(gpus):
                instance += 1
                yield _End(f"{kind}{number}", rank, len(gpus), gpu, instance)


def _iteration(gpu: int, ends: list[_End]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """What one GPU calls in an iteration."""
    own = {end.comm.rstrip("0123456789"): end for end in ends if end.gpu == gpu}
    stage = own["pp"].rank
    volumes = stage_volumes(_SHAPE, Mode.EXACT, stage)
    size = _SHAPE.activation_bytes
    calls: list[tuple[str, int, int, int, int]] = []  # kind, op, payload, peer, took
    for _ in range(_SHAPE.micro_batches):
        for forward in (True, False):
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            if 0 <= before < _SHAPE.pipeline:
                calls.append(("pp", 2, size, before, 4_000_000))
            many = int(volumes.tp.messages) // _SHAPE.micro_batches
            half = many // 3 if forward else many - many // 3
            calls += [("tp", 0, volumes.tp.message_bytes, -1, 0)] * half
            if 0 <= after < _SHAPE.pipeline:
                calls.append(("pp", 1, size, after, 4_000_000))
    calls.append(("dp", 0, volumes.dp.bytes, -1, 60_000_000))
    if "emb" in own:
        calls.append(("emb", 0, volumes.embedding_sync.bytes, -1, 9_000_000))
    step_ns = _PERIOD_NS * 9 // 10 // len(calls)
    return np.array(
        [
            (place * step_ns, own[kind].instance, op, payload, peer, took)
            for place, (kind, op, payload, peer, took) in enumerate(calls)
        ],
        dtype=_CALL,
    )


def _describe(writer: DatasetWriter, ends: list[_End], iterations: int) -> None:
    recording = {
        "schema_version": 1,
        "source": "railscope",
        "simulated": True,
        "began_ns": _BEGAN_NS - 1_000_000_000,
        "ended_ns": _BEGAN_NS + iterations * _PERIOD_NS,
        "calls_lost": 0,
        "operations_lost": 0,
        "lines_skipped": 0,
        "compute_recorded": False,
    }
    writer.add_rows("recordings", [recording], _BEGAN_NS)
    writer.add_rows(
        "communicators",
        [
            {
                "instance": end.instance,
                "comm": end.comm,
                "rank": end.rank,
                "nranks": end.nranks,
                "pid": 1000 + end.gpu,
                "gpu": str(end.gpu % _GPUS_OF_A_SERVER),
            }
            for end in ends
        ],
        _BEGAN_NS,
    )


def _calls(
    writer: DatasetWriter,
    rows: np.ndarray[tuple[int], np.dtype[np.void]],
    times: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> pa.Table:
    stream = rows["instance"].astype(np.int64)
    return _table("calls", writer, rows, {"time_ns": times, "tid": stream, "stream": stream})


def _operations(
    writer: DatasetWriter,
    rows: np.ndarray[tuple[int], np.dtype[np.void]],
    times: np.ndarray[tuple[int], np.dtype[np.int64]],
    took: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> pa.Table:
    source = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(rows), np.int32)), pa.array(["proxy"]))
    return _table("operations", writer, rows, {"begin_ns": times, "end_ns": times + took, "source": source})


def _table(
    name: str, writer: DatasetWriter, rows: np.ndarray[tuple[int], np.dtype[np.void]], more: dict[str, object]
) -> pa.Table:
    """Columns that calls and operations share, and those given; the others are null."""
    peer = rows["peer"].astype(np.int32)
    nothing = np.zeros(len(rows), dtype=np.int32)
    columns = {
        "recording": pa.array(np.full(len(rows), writer.recording, dtype=np.int64)),
        "node": pa.DictionaryArray.from_arrays(pa.array(nothing), pa.array([writer.node])),
        "instance": pa.array(rows["instance"].astype(np.int64)),
        "op": pa.DictionaryArray.from_arrays(pa.array(rows["op"].astype(np.int32)), pa.array(list(_OPS))),
        "data_type": pa.DictionaryArray.from_arrays(pa.array(nothing), pa.array(["Float16"])),
        "payload_bytes": pa.array(rows["payload"].astype(np.int64)),
        "peer": pa.array(peer, mask=peer < 0),
        **more,
    }
    return pa.table(
        {
            field.name: columns[field.name] if field.name in columns else pa.nulls(len(rows), field.type)
            for field in TABLES[name]
        }
    )


if __name__ == "__main__":
    told = sys.argv[3:]
    made = write_recording(Path(sys.argv[1]), int(sys.argv[2]), timed="timed" in told, varied="varied" in told)
    print(f"{made:,} calls")
