"""What `railscope import` takes of large files: MB of input for each second of processor time, and its most memory.

The files are made up (simulated) in the form that their writers give them: NCCL's log of four processes with and
without times, NCCL Inspector's lines, dumps of PyTorch's flight recorder with their stacks, and traces of Kineto, in
which one event of six is a kernel.  The processor time is that of the command and of all its workers, start included.

`python -m tests.bench.import_cost DIR MEGABYTES [FORMAT…]` only makes such files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import Built

PART: Final = "import"
_MEGABYTES: Final = 200
_RANKS: Final = 4
_TEXT: Final = 50.0
_KINETO: Final = 30.0
_MOST_MIB: Final = 600.0
"""Of the command and its workers, whatever the size of the files."""
_BEGAN_US: Final = 1_790_000_000_000_000
_SIZES: Final = (1 << 20, 25 << 20, 4096, 13_107_200, 8, 1 << 16)
_PACKAGES: Final = "/opt/venv/lib/python3.12/site-packages"


@dataclass(frozen=True, slots=True)
class _Made:
    """One kind of file."""

    suffix: str
    lines: Callable[[int], Iterator[str]]
    """Takes the rank; endless."""
    begins: Callable[[int], str]
    ends: str
    files: int


def _log_lines(rank: int, stamp: Callable[[int], str]) -> Iterator[str]:
    yield (
        f"gpu-node-1:{71 + rank}:{71 + rank} [{rank}] NCCL INFO ncclCommInitRankConfig comm 0x55d3a{rank}10 "
        f"rank {rank} nranks {_RANKS} cudaDev {rank} nvmlDev {rank} busId {rank + 1}b000 "
        "commId 0xbeef0123456789 - Init COMPLETE\n"
    )
    number = 0
    while True:
        size = _SIZES[number % len(_SIZES)]
        op = ("AllReduce", "AllGather", "ReduceScatter", "AllReduce")[number % 4]
        yield (
            f"{stamp(number)}gpu-node-1:{71 + rank}:{120 + rank} [{rank}] NCCL INFO {op}: opCount {number:x} sendbuff "
            f"0x7f6b{number * 4096 % (1 << 32):08x} recvbuff 0x7f6c{number * 4096 % (1 << 32):08x} count {size} "
            f"datatype 9 op 0 root 0 comm 0x55d3a{rank}10 [nranks={_RANKS}] stream 0x55d3b{rank}60\n"
        )
        number += 1


def _plain_log(rank: int) -> Iterator[str]:
    return _log_lines(rank, lambda _number: "")


def _timed_log(rank: int) -> Iterator[str]:
    def stamp(number: int) -> str:
        seconds, micros = divmod(number * 137, 1_000_000)
        return f"2026-01-06T{10 + seconds // 3600 % 12:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}Z "

    return _log_lines(rank, stamp)


def _inspector(rank: int) -> Iterator[str]:
    header = {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": _RANKS, "nnodes": 1}
    number = 0
    while True:
        number += 1
        metadata = {
            "inspector_output_format_version": "v4.0",
            "git_rev": "9d1b6a2",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": _BEGAN_US + number * 137,
            "hostname": "gpu-node-1",
            "pid": 71 + rank,
        }
        done = {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": _SIZES[number % len(_SIZES)],
            "coll_exec_time_us": 61 + number % 97,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 277.21,
            "coll_busbw_gbs": 485.11,
        }
        yield json.dumps({"header": header, "metadata": metadata, "coll_perf": done}) + "\n"


def _flight(_rank: int) -> Iterator[str]:
    frames = [
        {
            "name": "all_reduce",
            "filename": "/opt/venv/lib/python3.12/site-packages/torch/distributed/c10d.py",
            "line": 9,
        },
        {
            "name": "wrapper",
            "filename": "/opt/venv/lib/python3.12/site-packages/torch/distributed/logger.py",
            "line": 83,
        },
        {"name": "train_step", "filename": "/workspace/train.py", "line": 214},
    ]
    number = 0
    while True:
        created_ns = (_BEGAN_US + number * 137) * 1000
        entry = {
            "record_id": number,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": created_ns,
            "input_sizes": [[_SIZES[number % len(_SIZES)]]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[_SIZES[number % len(_SIZES)]]],
            "output_dtypes": ["BFloat16"],
            "state": "completed",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": created_ns + 90_000,
            "duration_ms": 0.06,
            "retired": True,
            "timeout_ms": 600000,
            "is_p2p": False,
            "frames": frames,
        }
        yield (", " if number else "") + json.dumps(entry)
        number += 1


def _kineto(rank: int) -> Iterator[str]:
    said = {
        "Collective name": "allreduce",
        "In msg nelems": 1_000_000,
        "Out msg nelems": 1_000_000,
        "Group size": _RANKS,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(_RANKS))),
    }
    number = 0
    while True:
        number += 1
        at = number * 10.0 + 0.125
        events: list[dict[str, Any]] = [
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": ("aten::mm", "aten::add_", "aten::native_layer_norm")[step % 3],
                "pid": 71 + rank,
                "tid": 71 + rank,
                "ts": at + step,
                "dur": 4.25,
                "args": {"External id": number * 8 + step, "Record function id": 0, "Ev Idx": number * 8 + step},
            }
            for step in range(4)
        ]
        launch = {"External id": number * 8, "cbid": 211, "correlation": number}
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 71 + rank,
                "tid": 71 + rank,
                "ts": at + 5,
                "dur": 3.5,
                "args": launch,
            }
        )
        on_gpu: dict[str, Any] = {
            "External id": number * 8,
            "queued": 0,
            "device": rank,
            "context": 1,
            "stream": 7,
            "correlation": number,
            "registers per thread": 128,
            "shared memory": 49152,
            "blocks per SM": 1.5,
            "warps per SM": 12.0,
            "grid": [108, 2, 1],
            "block": [128, 1, 1],
            "est. achieved occupancy %": 12,
        }
        name = f"void at::native::vectorized_elementwise_kernel<4, at::native::Functor{number % 40}>(int, char*)"
        if number % 10 == 0:
            call = {"External id": number * 8, **said}
            events.append(
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": "record_param_comms",
                    "pid": 71 + rank,
                    "tid": 71 + rank,
                    "ts": at + 6,
                    "dur": 40.0,
                    "args": call,
                }
            )
            on_gpu = {**on_gpu, **said, "stream": 20}
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": rank,
                "tid": on_gpu["stream"],
                "ts": at + 7,
                "dur": 8.5,
                "args": on_gpu,
            }
        )
        for event in events:
            yield ("" if at < 11 and event is events[0] else ",") + "\n  " + json.dumps(event, indent=2)


def _kineto_begins(rank: int) -> str:
    distributed = {"backend": "nccl", "rank": rank, "world_size": _RANKS}
    said = {"schemaVersion": 1, "distributedInfo": distributed, "baseTimeNanoseconds": _BEGAN_US * 1000}
    return json.dumps(said)[:-1] + ', "traceEvents": ['


def _flight_begins(_rank: int) -> str:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(_RANKS)))}}
    return json.dumps({"version": "2.10", "pg_config": groups})[:-1] + ', "entries": ['


def _nothing(_rank: int) -> str:
    return ""


KINDS: Final[Mapping[str, _Made]] = {
    "nccl-log": _Made(".log", _plain_log, _nothing, "", 2),
    "nccl-log-timed": _Made(".log", _timed_log, _nothing, "", 2),
    "nccl-inspector": _Made(".log", _inspector, _nothing, "", 2),
    "torch-flight-recorder": _Made(".json", _flight, _flight_begins, "]}", 4),
    "kineto": _Made(".json", _kineto, _kineto_begins, "\n]}", 4),
}
_BOUNDS: Final = {name: _KINETO if name == "kineto" else _TEXT for name in KINDS}


def make_files(folder: Path, kind: str, size_bytes: int) -> list[Path]:
    """Files of one kind, which have about so many bytes together; returns them."""
    made = KINDS[kind]
    files = []
    for rank in range(made.files):
        file = folder / f"{kind}_rank_{rank}{made.suffix}"
        left = size_bytes // made.files
        with file.open("w") as out:
            out.write(made.begins(rank))
            for line in made.lines(rank):
                out.write(line)
                left -= len(line)
                if left <= 0:
                    break
            out.write(made.ends)
        files.append(file)
    return files


@dataclass(frozen=True, slots=True)
class Taken:
    """What an import took."""

    cpu_s: float
    wall_s: float
    most_mib: float
    """Of the largest of its processes."""


def run_import(files: list[Path], folder: Path) -> Taken:
    """Run `railscope import` on files."""
    command = [sys.executable, "-m", "railscope.agent.cli.start", "import", *map(str, files), "-o", str(folder)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"railscope import ended with status {process.returncode}")
    return Taken(usage.ru_utime + usage.ru_stime, time.monotonic() - began, usage.ru_maxrss / 1024)


def measure(_built: Built, rounds: int) -> list[Line]:
    """One row for each kind of file."""
    lines: list[Line] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="railscope-import-") as place:
            files = make_files(Path(place), kind, _MEGABYTES * 1_000_000)
            megabytes = sum(file.stat().st_size for file in files) / 1e6
            taken = [run_import(files, Path(place, f"dataset-{number}")) for number in range(rounds)]
        rates = [megabytes / one.cpu_s for one in taken]
        name = f"{kind}, {megabytes:.0f} MB, for each second of processor time"
        note = "simulated files"
        lines.append(figure(PART, name, "MB", rates, target=Limit(Bound.AT_LEAST, _BOUNDS[kind]), note=note))
        most = [one.most_mib for one in taken]
        limit = Limit(Bound.AT_MOST, _MOST_MIB)
        lines.append(figure(PART, f"{kind}: most memory of a process", "MiB", most, target=limit, note=note))
    return lines


def main() -> None:
    """Make files."""
    folder, megabytes, *kinds = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for kind in kinds or KINDS:
        for file in make_files(Path(folder), kind, int(megabytes) * 1_000_000):
            print(file, file.stat().st_size)


if __name__ == "__main__":
    main()
