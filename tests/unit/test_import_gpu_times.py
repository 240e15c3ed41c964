"""What traces of GPUs tell of communication time, held against a second, simple reading of the same file.

All traces are made here.  `Truth` reads them anew: it marks each microsecond of each step in which a kernel that the
test calls communication, or computation, is under way.  It knows nothing of hosts, arguments and streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pytest

from railscope.agent.analysis.facts.report import Report
from railscope.agent.analysis.report.report import report_of
from railscope.agent.imports.communication_kernels import KernelNames
from railscope.agent.imports.runner import import_paths
from tests.unit.importing import Result, imported, written

Event = dict[str, Any]
BEGAN_US: Final = 1_000_000.0
RING: Final = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GENERIC: Final = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
GEMM: Final = "gemm_made_up"


@dataclass(frozen=True)
class Truth:
    """Shares of steps of `period_us` that begin `period_us` apart, from `first_us` on."""

    events: Sequence[Event]
    first_us: float
    period_us: int
    steps: int

    def shares(self, is_communication: Callable[[str], bool]) -> tuple[float, float]:
        """Communication, and communication while nothing computes, of a step; medians."""
        length = self.period_us * self.steps
        marked = {True: np.zeros(length, np.bool_), False: np.zeros(length, np.bool_)}
        for event in self.events:
            communicates = is_communication(event["name"])
            if event["cat"].lower() == "kernel" or communicates:
                begin = round(event["ts"] - self.first_us)
                marked[communicates][max(begin, 0) : max(begin + round(event["dur"]), 0)] = True
        busy, computing = (marked[one].reshape(self.steps, self.period_us) for one in (True, False))
        return float(np.median(busy.mean(axis=1))), float(np.median((busy & ~computing).mean(axis=1)))


def of_nccl(name: str) -> bool:
    return name.startswith(("nccl", "mscclKernel", "_Z23ncclDevKernel"))


def kernel(name: str, begin: float, length: float, stream: int = 7, **arguments: Any) -> Event:
    own = {"device": 0, "stream": stream, **arguments}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": length, "args": own}


def collective(external: int, elements: int, group: str = "0", name: str = "allreduce") -> dict[str, Any]:
    return {
        "External id": external,
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": 8,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group,
        "Process Group Description": f"group {group}",
        "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    }


def host_side(begin: float, arguments: dict[str, Any]) -> Event:
    return {
        "ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 77, "tid": 77, "ts": begin, "dur": 40.0,
        "args": arguments,
    }  # fmt: skip


def data_parallel(
    steps: int = 6,
    period: float = 20_000.0,
    host_period: float = 20_000.0,
    lead: float = 0.0,
    without_arguments: Sequence[int] = (),
    name: str = RING,
    host_clock: float = 0.0,
) -> list[Event]:
    """Two AllReduces a step at 2 to 8 and 9 to 17 ms, and a kernel of 4 ms at its begin: 70 % and 60 %."""
    events = []
    for step in range(steps):
        begin = BEGAN_US + step * period
        for number, (elements, offset, length) in enumerate(((1_000_000, 2000, 6000), (3_000_000, 9000, 8000))):
            said = collective(2 * step + number + 1, elements)
            if step in without_arguments:
                events.append(kernel(name, begin + offset, length, 9))
                continue
            events.append(host_side(BEGAN_US + host_clock - lead + step * host_period + number * 100, said))
            events.append(kernel(name, begin + offset, length, 9, **said))
        events.append(kernel(GEMM, begin, 4000))
    return events


def trace(folder: Path, events: Sequence[Event], name: str = "trace_rank0.json") -> Path:
    header = {"distributedInfo": {"rank": 0, "world_size": 8}, "baseTimeNanoseconds": 1_790_000_000_000_000_000}
    return written(folder, name, json.dumps({**header, "traceEvents": list(events)}))


def reported(folder: Path, events: Sequence[Event], names: KernelNames | None = None) -> tuple[Result, Report]:
    result = Result(import_paths([trace(folder, events)], folder / "dataset", None, None, names=names))
    return result, report_of(result.dataset)


def shares_of(report: Report) -> tuple[float, float]:
    """As `Truth.shares`."""
    known = [(one.comm_ratio, one.non_overlapped_ratio) for one in report.iterations]
    both = [(ratio, alone) for ratio, alone in known if ratio is not None and alone is not None]
    assert len(both) == len(known) > 0
    return median(ratio for ratio, _ in both), median(alone for _, alone in both)


def reasons(report: Report, row: int) -> list[str]:
    return [one.reason for one in report.unknown if one.row == row]


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        pytest.param(data_parallel(without_arguments=[0], lead=20_000, name=GENERIC), 6, id="launched before"),
        pytest.param(data_parallel(host_period=5000, lead=5000), 6, id="host ahead"),
        pytest.param(data_parallel(host_clock=-3_000_000), 6, id="GPU clock off"),
        pytest.param(data_parallel(without_arguments=range(6)), 6, id="CUDA graphs"),
        pytest.param(data_parallel(without_arguments=range(6), name=GENERIC), 6, id="RCCL"),
        pytest.param(
            data_parallel(without_arguments=range(6), name="_Z23ncclDevKernel_Generic_424ncclDevKernelArgsStorageIm"),
            6,
            id="mangled",
        ),
        pytest.param(
            data_parallel(without_arguments=[2, 3], name="ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(x)"),
            6,
            id="symmetric kernels",
        ),
        pytest.param(
            data_parallel(name="mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*)"), 6, id="MSCCL"
        ),
    ],
)
def test_communication_time_is_that_of_the_gpu(tmp_path: Path, events: list[Event], steps: int) -> None:
    truth = Truth(events, BEGAN_US, 20_000, steps).shares(of_nccl)
    assert truth == pytest.approx((0.7, 0.6))
    result, report = reported(tmp_path, events)
    assert report.regularity is not None
    assert report.regularity.period_seconds == pytest.approx(0.020)
    assert report.regularity.duty_cycle == pytest.approx(0.7)
    assert shares_of(report) == pytest.approx(truth)
    assert result.imported.problems.count == 0
    assert not any("PyTorch" in note for note in result.imported.problems.notes)


def test_a_trace_that_begins_in_the_middle_of_a_step_is_cut_at_whole_ones(tmp_path: Path) -> None:
    events = [event for event in data_parallel(steps=7) if event["ts"] >= BEGAN_US + 8500]
    truth = Truth(events, BEGAN_US + 20_000, 20_000, 6).shares(of_nccl)
    _, report = reported(tmp_path, events)
    assert truth == pytest.approx((0.7, 0.6))
    assert shares_of(report) == pytest.approx(truth)


def test_kernels_of_which_nothing_is_said_are_of_the_communicator_of_their_stream(tmp_path: Path) -> None:
    events = []
    for step in range(5):
        begin = BEGAN_US + step * 20_000
        for stream, group, offset in ((20, "1", 1000), (24, "2", 6000)):
            said = {} if step == 0 else collective(10 * step + stream, 1 << stream, group)
            events.append(kernel(RING, begin + offset, 4000, stream, **said))
        # One stream that two groups share tells nothing.
        events.append(kernel(RING, begin + 12_000, 1000, 30, **({} if step == 0 else collective(90 + step, 64, "1"))))
        events.append(kernel(RING, begin + 14_000, 1000, 30, **({} if step == 0 else collective(70 + step, 64, "2"))))
    result, report = reported(tmp_path, events)
    names = {row["instance"]: row["group_name"] for row in result.rows("communicators")}
    first = [row for row in result.rows("operations", "begin_ns") if row["payload_bytes"] is None]
    assert [(names[row["instance"]], row["op"]) for row in first] == [
        ("group 1", "AllReduce"), ("group 2", "AllReduce"), (None, "AllReduce"), (None, "AllReduce")
    ]  # fmt: skip
    assert len(report.communicators) == 2
    (note,) = (note for note in result.imported.problems.notes if "4 of 20 communication kernels" in note)
    assert "assigned to communicators by their streams: 2" in note


def custom(step: float, *names: str) -> list[Event]:
    """A step of 10 ms: an AllGather of 50 µs, 1.9 ms of each of these kernels, and 2 ms of computing."""
    said = collective(round(step) + 1, 25_000, "3", "_allgather_base")
    begin = BEGAN_US + step * 10_000
    return [
        host_side(begin, said),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", begin + 100, 50.0, **said),
        *(kernel(name, begin + 1000 + place * 2000, 1900.0) for place, name in enumerate(names)),
        kernel(GEMM, begin + 7000, 2000.0),
    ]


CUSTOM: Final = (
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, int)",
    "void deep_ep::internode::dispatch<false, 8, true>(int)",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
)


def test_communication_that_is_not_nccls_is_communication(tmp_path: Path) -> None:
    events = [event for step in range(6) for event in custom(step, *CUSTOM)]
    truth = Truth(events, BEGAN_US, 10_000, 6).shares(lambda name: name in CUSTOM or of_nccl(name))
    assert truth == pytest.approx((0.575, 0.575))
    result, report = reported(tmp_path, events)
    assert shares_of(report) == pytest.approx(truth)
    # It is of no communicator, and none is made up for it.
    assert [use.nranks for use in report.communicators] == [8]
    (note,) = (note for note in result.imported.problems.notes if "communication without NCCL" in note)
    assert "deep_ep::internode::dispatch (DeepEP, 6)" in note


SUSPECT: Final = "void mystery::fast_all_reduce<8>(float*)"


def test_a_kernel_that_only_sounds_like_communication_is_named_and_the_ratio_withheld(tmp_path: Path) -> None:
    events = [event for step in range(6) for event in custom(step, SUSPECT)]
    result, report = reported(tmp_path, events)
    assert {one.comm_ratio for one in report.iterations} == {None}
    assert report.regularity is not None
    assert report.regularity.period_seconds == pytest.approx(0.010)
    assert report.regularity.duty_cycle is None
    for row in (11, 12):
        (reason,) = reasons(report, row)
        assert "mystery::fast_all_reduce" in reason
        assert "(5, 9.5 ms)" in reason  # of the five whole steps
        assert "--communication-kernel" in reason
    (note,) = (note for note in result.imported.problems.notes if "may communicate" in note)
    assert "mystery::fast_all_reduce (6, 11.4 ms)" in note


@pytest.mark.parametrize(
    ("names", "is_communication"),
    [
        (KernelNames(communication=["mystery::fast"]), True),
        (KernelNames(computation=["mystery::fast"]), False),
    ],
)
def test_users_say_what_their_own_kernels_do(tmp_path: Path, names: KernelNames, is_communication: bool) -> None:
    events = [event for step in range(6) for event in custom(step, SUSPECT)]
    truth = Truth(events, BEGAN_US, 10_000, 6).shares(
        lambda name: of_nccl(name) or (is_communication and name == SUSPECT)
    )
    result, report = reported(tmp_path, events, names)
    assert shares_of(report) == pytest.approx(truth)
    assert not any("may communicate" in note for note in result.imported.problems.notes)


def test_suspects_that_take_next_to_no_time_withhold_nothing(tmp_path: Path) -> None:
    events = [event for step in range(6) for event in custom(step)]
    events += [kernel(SUSPECT, BEGAN_US + step * 10_000 + 9500, 5.0) for step in range(6)]
    _, report = reported(tmp_path, events)
    assert shares_of(report) == pytest.approx((0.005, 0.005))


def copy(name: str, begin: float, length: float, category: str = "gpu_memcpy", **arguments: Any) -> Event:
    own = {"stream": 33, "bytes": 1 << 20, **arguments}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 33, "ts": begin, "dur": length, "args": own}


def test_copy_engines_communicate_between_gpus_and_compute_nowhere(tmp_path: Path) -> None:
    events = []
    for step in range(6):
        begin = BEGAN_US + step * 10_000
        between: dict[str, Any] = {"fromDevice": 1, "inDevice": 0, "toDevice": 0}
        events += custom(step)
        events += [
            copy("Memcpy PtoP (Device -> Device)", begin + 1000, 2000.0, **between),
            # It hides nothing: no kernel computes while the first half of the copy between GPUs goes on.
            copy("Memcpy HtoD (Pinned -> Device)", begin + 1000, 1000.0, device=0),
            copy("Memset (Device)", begin + 1000, 1000.0, "gpu_memset", device=0),
            kernel("__amd_rocclr_copyBuffer.kd", begin + 1500, 500.0),
            kernel(GEMM, begin + 2000, 500.0),
        ]
    copies = ("Memcpy PtoP (Device -> Device)",)
    truth = Truth(
        [event for event in events if "rocclr" not in event["name"]], BEGAN_US, 10_000, 6
    ).shares(lambda name: of_nccl(name) or name in copies)  # fmt: skip
    assert truth == pytest.approx((0.205, 0.155))
    result, report = reported(tmp_path, events)
    assert shares_of(report) == pytest.approx(truth)
    sent = [row for row in result.rows("operations") if row["payload_bytes"] == 1 << 20]
    assert len(sent) == 6
    assert {row["op"] for row in sent} == {None}
    assert sum(bool(row["copies"]) for row in result.rows("compute")) == 18


def test_traces_of_old_pytorch_spell_categories_otherwise(tmp_path: Path) -> None:
    events = data_parallel(without_arguments=range(6), name="ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)")
    truth = Truth(events, BEGAN_US, 20_000, 6).shares(of_nccl)
    spelled = [{**event, "cat": "Kernel"} for event in events]
    spelled.append({"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 1.0, "dur": 1.0})
    _, report = reported(tmp_path, spelled)
    assert shares_of(report) == pytest.approx(truth)


def test_operations_of_unknown_size_are_no_anomalies_of_each_other(tmp_path: Path) -> None:
    # Three small buckets of gradients, then a large one, forty times: perfectly regular.
    name = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
    lengths = [12_000.0 if step % 4 == 3 else 1000.0 for step in range(160)]
    events = [kernel(name, BEGAN_US + step * 20_000, length, 14) for step, length in enumerate(lengths)]
    _, report = reported(tmp_path, events)
    assert report.latency.anomaly_count == 0
    assert any("160 operations of unknown kind or size" in reason for reason in reasons(report, 6))
    # A step is four of them, as their lengths tell, and not one.
    assert report.regularity is not None
    assert report.regularity.period_seconds == pytest.approx(0.080)
    assert median(one.comm_ratio or 0.0 for one in report.iterations) == pytest.approx(15 / 80)


def test_a_slow_operation_among_those_of_its_size_is_an_anomaly_still(tmp_path: Path) -> None:
    events = [
        kernel(RING, BEGAN_US + step * 20_000, 15_000.0 if step == 30 else 1000.0, 9, **collective(step + 1, 4096))
        for step in range(40)
    ]
    _, report = reported(tmp_path, events)
    assert report.latency.anomaly_count == 1
    assert report.latency.anomalies[0].seconds == pytest.approx(0.015)


def test_calls_count_in_the_step_in_which_their_kernel_began(tmp_path: Path) -> None:
    """Uneven all-to-alls, enqueued a step in advance: each step's inequality is its own."""
    files = []
    for rank in (0, 1):
        events = []
        for step in range(6):
            begin = BEGAN_US + step * 20_000
            for number, elements in enumerate((1000 * (step + 1), 2000)):
                said = {
                    **collective(2 * step + number + 1, 2 * elements + 8, "0", "all_to_allv"),
                    "Group size": 2,
                    "Process Group Ranks": "[0, 1]",
                    "In split size": f"[8, {2 * elements}]" if rank == 0 else f"[{elements}, {elements + 8}]",
                    "Out split size": "[]",
                }
                events.append(host_side(BEGAN_US - 50_000 + step * 2000 + number * 100, said))
                events.append(kernel("ncclDevKernel_SendRecv(x)", begin + 3000 + number * 5000, 1000.0, 9, **said))
        header = {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": 10**18}
        text = json.dumps({**header, "traceEvents": events})
        files.append(written(tmp_path, f"trace_rank{rank}.json", text))
    result = imported(tmp_path, *files, node="gpu-node-1")
    report = report_of(result.dataset)
    assert len(report.iterations) == 5
    # Rank 0 sends twice what rank 1 sends, in each of both exchanges, of elements of two bytes.
    assert [one.all_to_all and one.all_to_all.max_minus_min_bytes for one in report.iterations] == [
        2 * (1000 * (step + 1) + 2000) for step in range(5)
    ]
