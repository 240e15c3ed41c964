"""What container runtimes, schedulers, launchers and loggers put before NCCL's lines, and the times there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from tests.unit.importing import Result, imported, written

WRITTEN: Final = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SECOND: Final = 1_000_000_000
Wrap = Callable[[str, int], str]


def moment(hour: int = 10, nanoseconds: int = 0, year: int = 2026) -> int:
    """The sixth of January, eleven minutes and twelve seconds past an hour."""
    return int(datetime(year, 1, 6, hour, 11, 12, tzinfo=UTC).timestamp()) * SECOND + nanoseconds


def before(prefix: str) -> Wrap:
    return lambda line, rank: prefix.format(r=rank) + line


def in_json(**more: object) -> Wrap:
    def wrapped(line: str, _rank: int) -> str:
        return json.dumps({name: line + "\n" if value is None else value for name, value in more.items()})

    return wrapped


NOW: Final = moment()
EPOCH: Final = NOW // SECOND
ISO: Final = "2026-01-06T10:11:12.123456789Z"
PLAIN: Final[dict[str, Wrap]] = {
    "nothing": before(""),
    "torchrun --tee": before("[default{r}]:"),
    "torchrun": before("[rank{r}]:"),
    "srun -l": before("{r}: "),
    "srun -l, wide": before(" {r}: "),
    "pdsh": before("nodeA: "),
    "mpirun --tag-output": before("[1,{r}]<stdout>:"),
    "mpirun 5": before("[nodeA:1,{r}]<stdout>: "),
    "mpich": before("[{r}] "),
    "kubectl --prefix": before("[pod/train-0/main] "),
    "compose": before("worker-1  | "),
    "ray": before("(RayWorkerWrapper pid=9{r}, ip=10.0.0.1) "),
    "vllm": before("(EngineCore_DP0 pid=77) (Worker_TP{r} pid=9{r}) "),
    "colours": before("\x1b[36m(Worker pid=9{r})\x1b[0m "),
    "a cursor that moves": before("\x1b[2K\x1b[1A\x1b]0;title\x07"),
    "tabs": before("stdout\t"),
    "logging": before("INFO:"),
    "a quote": before("> "),
    "carriage returns": lambda line, _rank: line + "\r",
    "tqdm": before(" 50%|#####     | 5/10 [00:01<00:01,  4.9it/s]"),
    "tqdm, overwritten": before(" 10%|# | 1/10 [10:11:12<11:00:00]\r 20%|## | 2/10 [10:11:13<11:00:00]\r"),
    "lightning": before("Epoch 0:  10%|█  | 1/10 [00:01<00:09, v_num=3]"),
    "json without a time": in_json(log=None, stream="stderr"),
}
TIMED: Final[dict[str, tuple[Wrap, int]]] = {
    "docker logs -t": (before(f"{ISO} "), moment(nanoseconds=123_456_789)),
    "CRI": (before(f"{ISO} stdout F "), moment(nanoseconds=123_456_789)),
    "CRI with a zone": (before("2026-01-06T11:11:12.5+01:00 stderr F "), moment(nanoseconds=500_000_000)),
    "docker's file": (in_json(log=None, stream="stderr", time=ISO), moment(nanoseconds=123_456_789)),
    "fluentd's file": (
        lambda line, _rank: f'2026-01-06T10:11:12+00:00\tkube.train\t{json.dumps({"log": line})}',
        NOW,
    ),
    "fluent-bit's stdout": (before('[0] kube.x: [[' + f'{EPOCH}.250000000' + ', {{}}], {{"log"=>"'), NOW + SECOND // 4),
    "fluent-bit's JSON": (in_json(date=EPOCH + 0.5, log=None), NOW + SECOND // 2),
    "Loki": (in_json(labels={"app": "x"}, line=None, timestamp=ISO), moment(nanoseconds=123_456_789)),
    "Loki's nanoseconds": (in_json(ts=str(NOW + 7), line=None), NOW + 7),
    "CloudWatch": (in_json(timestamp=NOW // 1_000_000, message=None), NOW),
    "Cloud Logging": (in_json(textPayload=None, timestamp=ISO), moment(nanoseconds=123_456_789)),
    "OpenTelemetry": (
        lambda line, _rank: json.dumps({"timeUnixNano": str(NOW), "body": {"stringValue": line}}),
        NOW,
    ),
    "journalctl -o json": (in_json(__REALTIME_TIMESTAMP=str(NOW // 1000), MESSAGE=None), NOW),
    "python-json-logger": (in_json(asctime="2026-01-06 10:11:12,345", message=None), NOW + 345_000_000),
    "JSON within a prefix": (
        lambda line, _rank: f"train-0 main {json.dumps({'msg': {'text': line}, 'time': ISO})}",
        moment(nanoseconds=123_456_789),
    ),
    "journald": (before("Jan 06 10:11:12 nodeA python[9{r}]: "), NOW),
    "journald, precise": (before("Jan 06 10:11:12.000123 nodeA python[9{r}]: "), NOW + 123_000),
    "journald, unix": (before(f"{EPOCH}.000123 nodeA python[9{{r}}]: "), NOW + 123_000),
    "journald, full": (before("Tue 2026-01-06 10:11:12 UTC nodeA python[9{r}]: "), NOW),
    "journald, of last year": (before("Dec 31 10:11:12 nodeA python[9{r}]: "), moment(year=2026) - 6 * 86_400 * SECOND),
    "syslog, RFC 3164": (before("<34>Jan  6 10:11:12 nodeA train[9{r}]: "), NOW),
    "syslog, RFC 5424": (before("<165>1 2026-01-06T10:11:12.003Z nodeA train 9{r} - - "), NOW + 3_000_000),
    "syslog, ISO": (before("2026-01-06T11:11:12.5+0100 nodeA train[9{r}]: "), NOW + SECOND // 2),
    "mpirun --timestamp-output": (before("Tue Jan  6 10:11:12 2026[1,{r}]<stdout>:"), NOW),
    "mpirun 5, timestamp": (before("[Tue Jan  6 10:11:12 2026][nodeA:1,{r}]<stdout>: "), NOW),
    "compose -t": (before(f"worker-1  | {ISO} "), moment(nanoseconds=123_456_789)),
    "kubectl --timestamps --prefix": (before(f"[pod/train-0/main] {ISO} "), moment(nanoseconds=123_456_789)),
    "NCCL": (before("[2026-01-06 10:11:12] "), NOW),
    "NCCL, milliseconds": (before("[2026-01-06 10:11:12.345] "), NOW + 345_000_000),
    "NCCL, clock alone": (before("[10:11:12.345] "), int(WRITTEN.timestamp()) // 86_400 * 86_400 * SECOND
                          + (10 * 3600 + 11 * 60 + 12) * SECOND + 345_000_000),
    "NCCL, behind docker's": (before(f"{ISO} [2026-01-06 10:11:12] "), NOW),
    "NCCL, behind journald's": (before("Jan 06 10:11:13 nodeA x[1]: [2026-01-06 10:11:12] "), NOW),
    "journald's, behind a file's": (before("2026-01-06 11:00:00 Jan 06 10:11:12 nodeA x[1]: "), NOW),
    "wandb": (before("2026-01-06 10:11:12,345 INFO    MainThread:9{r} [x.py:1] "), NOW + 345_000_000),
    "vLLM's logger": (before("(Worker_TP{r} pid=9{r}) INFO 01-06 10:11:12 [pynccl.py:70] "), NOW),
    "glog": (before("I0106 10:11:12.345678 9{r} x.cpp:12] "), NOW + 345_678_000),
    "Go": (before("2026/01/06 10:11:12 "), NOW),
    "nginx": (before("[06/Jan/2026:11:11:12 +0100] "), NOW),
    "PyTorch": (before("[rank{r}]:[I106 10:11:12.000000000 x.cpp:1] 2026-01-06 10:11:12.5 "), NOW + SECOND // 2),
    "epoch in brackets": (before(f"[{EPOCH}.125] "), NOW + SECOND // 8),
    "epoch in milliseconds": (before(f"{EPOCH}125 "), NOW + SECOND // 8),
}  # fmt: skip


def log(folder: Path, wrap: Wrap) -> Result:
    """A job of two ranks: their Init lines, and three AllReduces of each."""
    lines = [
        wrap(
            f"nodeA:9{rank}:9{rank} [{rank}] NCCL INFO ncclCommInitRankConfig comm 0x5500{rank}0 rank {rank} nranks 2 "
            f"cudaDev {rank} nvmlDev {rank} busId {rank}b000 commId 0xbeef01 - Init COMPLETE",
            rank,
        )
        for rank in range(2)
    ]
    lines += [
        wrap(
            f"nodeA:9{rank}:12{rank} [{rank}] NCCL INFO AllReduce: opCount {at:x} sendbuff 0x7f00 recvbuff 0x7f00 "
            f"count {1000 + at} datatype 9 op 0 root 0 comm 0x5500{rank}0 [nranks=2] stream 0x66{rank}",
            rank,
        )
        for at in range(3)
        for rank in range(2)
    ]
    file = written(folder, "job.log", "\n".join(lines) + "\n")
    os.utime(file, (WRITTEN.timestamp(), WRITTEN.timestamp()))
    return imported(folder, file)


def check(result: Result) -> None:
    assert result.imported.problems.count == 0
    assert [(one.node, one.calls, one.communicator_ends) for one in result.imported.nodes] == [("nodeA", 6, 2)]
    assert sorted(result.calls()) == [(rank, "AllReduce", 2 * (1000 + at), None) for rank in (0, 1) for at in range(3)]
    ends = result.rows("communicators", "rank")
    assert [(row["comm"], row["pid"], row["gpu"]) for row in ends] == [
        ("0000000000beef01", 90, "0"), ("0000000000beef01", 91, "1")
    ]  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_no_prefix_takes_a_call_or_its_process(tmp_path: Path, name: str) -> None:
    result = log(tmp_path, PLAIN[name])
    check(result)
    assert not result.imported.times_known


@pytest.mark.parametrize("name", TIMED)
def test_the_time_in_a_prefix_is_the_time_of_its_call(tmp_path: Path, name: str) -> None:
    wrap, expected_ns = TIMED[name]
    result = log(tmp_path, wrap)
    check(result)
    assert result.imported.times_known
    times = [row["time_ns"] for row in result.rows("calls", "time_ns")]
    # Equal times are told apart by a nanosecond a call.
    assert times == [expected_ns + at for at in range(6)]


def test_a_clock_without_a_day_goes_on_behind_midnight(tmp_path: Path) -> None:
    clocks = iter(("23:59:58", "23:59:59", "23:59:59", "00:00:01", "00:00:02", "00:00:03", "00:00:04", "00:00:05"))
    result = log(tmp_path, lambda line, _rank: f"[{next(clocks)}] {line}")
    times = [row["time_ns"] // SECOND for row in result.rows("calls", "time_ns")]
    assert [time - times[0] for time in times] == [0, 2, 3, 4, 5, 6]
    assert any("no date" in note for note in result.imported.problems.notes)


def test_lines_that_name_only_their_gpu_are_those_of_a_process_for_each(tmp_path: Path) -> None:
    strip = "nodeA:90:90 ", "nodeA:91:91 ", "nodeA:90:120 ", "nodeA:91:121 "

    def bare(line: str, _rank: int) -> str:
        return next(line.removeprefix(one) for one in strip if line.startswith(one))

    result = log(tmp_path, bare)
    assert result.imported.problems.count == 0
    assert sorted(row[:3] for row in result.calls()) == [
        (rank, "AllReduce", 2 * (1000 + at)) for rank in (0, 1) for at in range(3)
    ]
    ends = result.rows("communicators", "rank")
    assert [(row["node"], row["pid"], row["gpu"], row["comm"]) for row in ends] == [
        ("imported", None, "0", "0000000000beef01"), ("imported", None, "1", "0000000000beef01")
    ]  # fmt: skip


def test_one_process_of_rccl_with_all_gpus_is_one_communicator(tmp_path: Path) -> None:
    lines = [
        f"amd1:600:600 [3] NCCL INFO AllReduce: opCount {at} sendbuff 0x7f{rank} recvbuff 0x7f{rank} count 4096 "
        f"datatype 6 op 0 root 0 comm 0x9{rank} [nranks=4] stream 0x8{rank} task 0 globalrank {rank}"
        for at in range(2)
        for rank in range(4)
    ]
    result = imported(tmp_path, written(tmp_path, "rccl.log", "\n".join(lines)))
    ends = result.rows("communicators", "rank")
    # The line names the GPU that was current when the group ended, which is none of theirs but one.
    assert [(row["rank"], row["nranks"], row["gpu"]) for row in ends] == [(rank, 4, None) for rank in range(4)]
    assert len({row["comm"] for row in ends}) == 1
    assert len(result.calls()) == 8
    assert not any("could not be matched" in note for note in result.imported.problems.notes)


def test_lines_that_ray_left_out_are_told_of(tmp_path: Path) -> None:
    result = log(tmp_path, lambda line, _rank: f"(W pid=1) {line} [repeated 7x across cluster]")
    assert any(note.startswith("Ray left out lines") for note in result.imported.problems.notes)


def test_lines_have_their_numbers_whatever_wraps_them(tmp_path: Path) -> None:
    def odd(line: str, _rank: int) -> str:
        return json.dumps({"log": line.replace("datatype 9", "datatype 99") + "\nmore\n", "time": ISO})

    assert [line for line, _ in log(tmp_path, odd).skipped] == [3, 4, 5, 6, 7, 8]
