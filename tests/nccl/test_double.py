"""The CUDA test double plays NCCL's kernels rightly, and refuses by name what it cannot play.

The library is the real one from PyPI and the network is the kernel's; only the GPU is simulated.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import FLAGS, KERNEL_SOURCES, SOURCES, BuildError, Double, build
from railscope.testbed.nccl.library import OLDER_NCCL_VERSION, REPOSITORY, LibraryMissing, nccl_library
from tests.nccl.job import CallResult, Job, JobError

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

REMOTE_ERROR = 6  # ncclRemoteError
ENDLESS = 1_000_000  # iterations: more than a job makes before it is ended

FETCH = REPOSITORY / "testbed/nccl/fetch-wheels"


def runs(pid: int, program: Path) -> bool:
    """Whether this process runs this file, whatever its path is in the mount namespace of the process."""
    try:
        return Path(f"/proc/{pid}/exe").samefile(program)
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def older_double() -> Double:
    return build(version=OLDER_NCCL_VERSION)


def test_every_operation_type_and_reduction_is_right_on_two_hosts(
    two_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="everything", iterations=2, size_bytes=20_000) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True, True]
    # 7 types; 5 reductions where one applies; every repetition is counted
    assert reports[0].count("AllReduce").calls == 7 * 5 * 2
    assert reports[0].count("AllGather").calls == 7 * 2


def test_every_operation_type_and_reduction_is_right_on_four_hosts(
    four_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    with Job(four_hosts, tmp_path, double, pattern="everything", size_bytes=4_000) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True] * 4
    assert [report.rank for report in reports] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("size_bytes", "buffer_bytes"), [(8, None), (5_000_004, None), (5_000_004, "65536")], ids=["one", "loop", "loops"]
)
def test_sizes_from_one_element_to_many_loops_are_right(
    two_hosts: Fabric, tmp_path: Path, double: Double, size_bytes: int, buffer_bytes: str | None
) -> None:
    """With small buffers a ring goes round many times, and the last time is a short one."""
    environment = {"NCCL_BUFFSIZE": buffer_bytes}
    with Job(
        two_hosts, tmp_path, double, pattern="mixed", iterations=2, size_bytes=size_bytes, environment=environment
    ) as job:
        reports = job.run()
    assert all(report.verified for report in reports)
    assert all(entry.payload_bytes == entry.calls * size_bytes for entry in reports[0].operations)
    assert [entry.operation for entry in reports[0].operations] == [
        "AllReduce",
        "AllGather",
        "ReduceScatter",
        "Broadcast",
        "Reduce",
        "AllToAll",
        "Send",
        "Recv",
    ]


@pytest.mark.parametrize(("damage", "element"), [("element", 999), ("operation", 0)])
def test_a_wrong_element_and_an_operation_that_never_ran_are_noticed(
    two_hosts: Fabric, tmp_path: Path, double: Double, damage: str, element: int
) -> None:
    environment = {"NCCL_DRIVER_DAMAGE": damage}
    with (
        Job(two_hosts, tmp_path, double, iterations=2, size_bytes=4_000, environment=environment) as job,
        pytest.raises(JobError, match=rf"count 1000: element {element} is \S+, not "),
    ):
        job.run()


@pytest.mark.parametrize("size_bytes", [3_000, 2_000_000])
def test_with_the_algorithms_and_protocols_that_nccl_itself_prefers(
    four_hosts: Fabric, tmp_path: Path, double: Double, size_bytes: int
) -> None:
    free_choice = dict.fromkeys(["NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LL_THRESHOLD"])
    with Job(
        four_hosts, tmp_path, double, pattern="mixed", iterations=2, size_bytes=size_bytes, environment=free_choice
    ) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True] * 4


@pytest.mark.parametrize(
    ("protocol", "type_name", "reduction"),
    [("LL", "f32", "sum"), ("SIMPLE", "bf16", "max"), ("SIMPLE", "i32", "avg")],
)
def test_the_tree_sums_up_and_down(
    four_hosts: Fabric, tmp_path: Path, double: Double, protocol: str, type_name: str, reduction: str
) -> None:
    way = {"NCCL_ALGO": "TREE", "NCCL_PROTO": protocol}
    with Job(
        four_hosts, tmp_path, double, type_name=type_name, reduction=reduction, size_bytes=500_000, environment=way
    ) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True] * 4


def test_two_ranks_of_one_host_talk_through_shared_memory(two_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    with Job(two_hosts, tmp_path, double, pattern="mixed", size_bytes=300_000, ranks_per_host=2) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True] * 4


def test_small_messages_inside_a_host_may_take_the_low_latency_protocol(
    two_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    low_latency = {"NCCL_P2P_LL_THRESHOLD": "16384"}
    with Job(
        two_hosts, tmp_path, double, pattern="sendrecv", size_bytes=4096, ranks_per_host=2, environment=low_latency
    ) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True] * 4


def test_several_communicators_run_at_once(two_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    with Job(two_hosts, tmp_path, double, pattern="mixed", size_bytes=300_000, communicators=3) as job:
        reports = job.run()
    assert all(report.verified for report in reports)
    assert reports[0].count("AllReduce").calls == 3


def test_collectives_of_one_group_share_a_launch_and_are_right(
    two_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="grouped", iterations=3, size_bytes=1 << 20) as job:
        reports = job.run()
    assert all(report.verified for report in reports)
    assert reports[0].count("AllReduce").calls == 4 * 3


def test_a_split_communicator_works_beside_its_parent(four_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    with Job(four_hosts, tmp_path, double, pattern="split", iterations=3, size_bytes=100_000) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True] * 4


def test_a_kernel_whose_peer_never_comes_ends_when_the_communicator_is_aborted(
    two_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="abandoned") as job:
        reports = job.run()
    assert [report.count("AllReduce").calls for report in reports] == [0, 1]


def test_a_revoked_communicator_is_quiet_and_can_be_destroyed(
    two_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="revoked") as job:
        reports = job.run()
    assert [report.results for report in reports] == [
        (
            CallResult("ncclCommGetAsyncError", 0),
            CallResult("ncclCommRevoke", 0),
            CallResult("ncclCommGetAsyncError after ncclCommRevoke", 0),
            CallResult("ncclCommDestroy", 0),
        )
    ] * 2


@pytest.mark.parametrize(
    ("pattern", "afterwards"),
    [
        ("bereaved", ()),
        (
            "bereaved-revoke",
            (
                CallResult("ncclCommRevoke", 0),
                CallResult("ncclCommGetAsyncError after ncclCommRevoke", REMOTE_ERROR),
            ),
        ),
    ],
)
def test_when_a_rank_dies_the_survivor_learns_it_and_aborts(
    two_hosts: Fabric, tmp_path: Path, double: Double, pattern: str, afterwards: tuple[CallResult, ...]
) -> None:
    with Job(two_hosts, tmp_path, double, pattern=pattern, iterations=ENDLESS, size_bytes=4096) as job:
        job.start()
        job.under_way()
        job.kill(1)
        (survivor,) = job.wait()
    assert survivor.verified
    assert survivor.results == (
        CallResult("ncclCommGetAsyncError", REMOTE_ERROR),
        *afterwards,
        CallResult("ncclCommAbort", 0),
    )


def test_a_captured_graph_is_enqueued_once_and_replayed_often(
    two_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    replays, size_bytes = 20, 1 << 20
    before = sum(two_hosts.counters(0, rail).transmit_bytes for rail in range(2))
    with Job(
        two_hosts, tmp_path, double, pattern="graph", iterations=replays, size_bytes=size_bytes,
        environment={"CUDA_DOUBLE_LOG": "1"},
    ) as job:  # fmt: skip
        reports = job.run()
        said = job.output(0)
    sent = sum(two_hosts.counters(0, rail).transmit_bytes for rail in range(2)) - before
    assert [report.verified for report in reports] == [True, True]
    for report in reports:
        assert [(entry.operation, entry.calls) for entry in report.operations] == [("AllReduce", 1), ("AllGather", 1)]
        assert report.replays("AllReduce").calls == report.replays("AllGather").calls == replays
        assert report.replays("AllGather").payload_bytes == replays * size_bytes
    # NCCL's host function, which hands each plan to its proxy, is a node of the graph before each kernel.
    steps = re.findall(r"graph 1, node \d+: (host function|kernel) (\w+)", said)
    assert [name for _, name in steps] == [
        "_ZL22hostStreamPlanCallbackPv",
        "ncclDevKernel_AllReduce_f32_RING",
        "_ZL22hostStreamPlanCallbackPv",
        "ncclDevKernel_AllGather_RING",
    ]
    # of two ranks each sends the payload once in an AllReduce and its own part in an AllGather, at every replay
    assert 2 * replays * size_bytes < sent < 1.1 * 2 * replays * size_bytes


def test_live_calls_between_replays_of_a_graph_are_right(two_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    with Job(
        two_hosts, tmp_path, double, pattern="graph-and-live", iterations=50, size_bytes=50_000, communicators=2
    ) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True, True]
    assert reports[0].count("AllReduce").calls == 2 * (1 + 50)
    assert reports[0].replays("AllReduce").calls == 2 * 50


def test_a_captured_group_too_large_for_a_kernels_arguments_is_right(
    two_hosts: Fabric, tmp_path: Path, double: Double
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="graph-of-group", iterations=5, size_bytes=5_000) as job:
        reports = job.run()
    assert [report.verified for report in reports] == [True, True]
    assert reports[0].replays("AllReduce").calls == 5 * reports[0].count("AllReduce").calls == 5 * 48


@pytest.mark.parametrize("events", ["query", "synchronize", "stream", "watchdog"])
def test_a_job_learns_of_completion_through_a_cuda_runtime_that_it_maps(
    two_hosts: Fabric, tmp_path: Path, double: Double, events: str
) -> None:
    with Job(
        two_hosts, tmp_path, double, pattern="mixed", iterations=20, size_bytes=100_000, events=events, hold=True
    ) as job:
        pids = job.ready()
        mapped = Path(f"/proc/{pids[0]}/maps").read_text()
        job.release()
        job.start()
        reports = job.wait()
    assert str(double.cuda_runtime) in mapped
    assert str(double.cuda_driver) in mapped
    assert [report.verified for report in reports] == [True, True]
    calls = 7 * 20
    for report in reports:
        seen = report.events
        assert (seen.recorded, seen.stream_waits) == (2 * calls, calls)
        assert seen.event_synchronizes == (calls if events == "synchronize" else 0)
        assert seen.stream_synchronizes == (calls if events == "stream" else 0)
        assert seen.queries - seen.not_ready == (calls if events in ("query", "watchdog") else 0)


def test_a_job_without_events_maps_no_cuda_runtime(two_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    with Job(two_hosts, tmp_path, double) as job:
        pids = job.ready()
        mapped = Path(f"/proc/{pids[0]}/maps").read_text()
        reports = job.run()
    assert "libcudart" not in mapped
    assert reports[0].events.recorded == 0


def test_twenty_thousand_operations_of_all_kinds_are_counted(two_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    rounds = 2_858
    with Job(two_hosts, tmp_path, double, pattern="mixed", iterations=rounds, size_bytes=1024) as job:
        reports = job.run()
    for report in reports:
        assert report.verified
        calls = {entry.operation: entry.calls for entry in report.operations}
        assert calls.pop("Send") == calls.pop("Recv") == 2 * rounds
        assert list(calls.values()) == [rounds] * 6
        assert all(entry.payload_bytes == entry.calls * 1024 for entry in report.operations)


def test_an_older_nccl_is_played_as_well(two_hosts: Fabric, tmp_path: Path, older_double: Double) -> None:
    with Job(two_hosts, tmp_path, older_double, pattern="everything", iterations=2, size_bytes=20_000) as job:
        reports = job.run()
    assert [(report.verified, report.nccl_version) for report in reports] == [(True, 22809)] * 2
    assert reports[0].count("AllReduce").calls == 7 * 5 * 2


def test_an_older_nccl_replays_graphs_and_reports_a_dead_peer(
    two_hosts: Fabric, tmp_path: Path, older_double: Double
) -> None:
    for name in ("graph", "dead"):
        (tmp_path / name).mkdir()
    with Job(two_hosts, tmp_path / "graph", older_double, pattern="graph", iterations=10) as job:
        assert [report.verified for report in job.run()] == [True, True]
    with Job(two_hosts, tmp_path / "dead", older_double, pattern="bereaved", iterations=ENDLESS) as job:
        job.start()
        job.under_way()
        job.kill(0)
        (survivor,) = job.wait()
    assert survivor.results == (CallResult("ncclCommGetAsyncError", REMOTE_ERROR), CallResult("ncclCommAbort", 0))


def test_a_version_that_the_double_does_not_play_is_refused() -> None:
    with pytest.raises(BuildError, match=r"plays NCCL 2\.32\.3 and 2\.28\.9, not 2\.27\.7"):
        build(version="2.27.7")


def test_the_bytes_of_a_ring_cross_both_rails(two_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    payload_bytes = 32 * (1 << 20)
    before = [two_hosts.counters(0, rail).transmit_bytes for rail in range(2)]
    with Job(two_hosts, tmp_path, double, iterations=32, size_bytes=1 << 20) as job:
        (report, _) = job.run()
    sent = [two_hosts.counters(0, rail).transmit_bytes - before[rail] for rail in range(2)]
    assert report.count("AllReduce").payload_bytes == payload_bytes
    # 2(n-1)/n of the payload leaves a host; headers and NCCL's own set-up come on top
    assert payload_bytes < sum(sent) < 1.1 * payload_bytes
    assert min(sent) > 0.4 * payload_bytes


def test_ranks_wait_for_the_start_signal_and_stay_while_held(two_hosts: Fabric, tmp_path: Path, double: Double) -> None:
    with Job(two_hosts, tmp_path, double, hold=True) as job:
        pids = job.ready()
        assert not list(tmp_path.glob("report.*"))
        job.start()
        assert [report.pid for report in job.finished()] == list(pids)
        assert all(runs(pid, double.driver) for pid in pids)
        job.release()
        job.wait()
    assert not any(runs(pid, double.driver) for pid in pids)


@pytest.mark.parametrize(
    ("pattern", "environment", "named"),
    [
        ("allgather", {"NCCL_PROTO": "LL128"}, "device function ncclDevFunc_AllGather_RING_LL128"),
        ("allgather", {"NCCL_ALGO": "PAT"}, "device function ncclDevFunc_AllGather_PAT_SIMPLE"),
    ],
)
def test_what_the_double_cannot_play_aborts_by_name(
    two_hosts: Fabric, tmp_path: Path, double: Double, pattern: str, environment: dict[str, str], named: str
) -> None:
    with (
        Job(two_hosts, tmp_path, double, pattern=pattern, size_bytes=4096, environment=environment) as job,
        pytest.raises(JobError, match=f"cuda-double.*unsupported.*{named}"),
    ):
        job.run()


@pytest.fixture(scope="module")
def unplayable(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that lets the double play one launch which is made up."""
    program = tmp_path_factory.mktemp("unplayable") / "unplayable"
    sources = [SOURCES / name for name in ("unplayable.c", *KERNEL_SOURCES)]
    subprocess.run(["gcc", *FLAGS, f"-I{double.layout.parent}", "-o", program, *sources], check=True)
    return program


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("work-type", "unsupported kernel ncclDevKernel_AllReduce_Sum_f32_RING_LL: work type 2"),
        ("another-kernel", "unsupported kernel _Z9somethingv"),
        ("tree-of-allgather", "device function ncclDevFunc_AllGather_TREE_SIMPLE"),
        ("collective-as-point-to-point", "ncclDevFunc_AllReduce_Sum_f32_RING_SIMPLE as point-to-point work"),
        *((f"{who}registered{how}", "registered user buffers")
          for who in ("", "send-", "receive-") for how in ("", "-with-network")),
    ],
)  # fmt: skip
def test_launches_that_need_more_than_a_plain_gpu_abort_by_name(unplayable: Path, what: str, said: str) -> None:
    done = subprocess.run([unplayable, what], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "")
    assert done.stderr.startswith("unsupported kernel ")
    assert done.stderr.endswith(said)


def test_a_graph_launched_into_a_capture_aborts_by_name(double: Double) -> None:
    program = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
stream, event, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
cuda.cudaStreamCreate(ctypes.byref(stream))
cuda.cudaEventCreate(ctypes.byref(event))
cuda.cudaStreamBeginCapture(stream, 0)
cuda.cudaEventRecord(event, stream)
print(cuda.cudaEventQuery(event), cuda.cudaStreamSynchronize(stream), flush=True)
cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
cuda.cudaStreamBeginCapture(stream, 0)
cuda.cudaGraphLaunch(graph, stream)
"""
    done = subprocess.run([sys.executable, "-c", program, double.cuda_runtime], capture_output=True, text=True)
    assert done.stdout == "907 900\n"  # cudaErrorCapturedEvent, cudaErrorStreamCaptureUnsupported
    assert done.returncode == -signal.SIGABRT
    assert "unsupported cudaGraphLaunch into a stream that is being captured" in done.stderr


def test_a_library_without_nccls_structures_is_refused(tmp_path: Path, double: Double) -> None:
    command = [sys.executable, str(SOURCES / "make-layout.py"), str(double.shared_object), str(tmp_path / "layout.h")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "does not describe ncclConnFifo" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_double_built_for_another_library_refuses_this_one(tmp_path: Path, double: Double) -> None:
    folder = double.shared_object.parent
    layout = double.layout.read_text()
    build_id = layout.partition('LAYOUT_BUILD_ID "')[2].partition('"')[0]
    (tmp_path / "double.so").write_bytes(double.shared_object.read_bytes().replace(build_id.encode(), b"0" * 40))
    environment = {
        **os.environ,
        "LD_PRELOAD": str(tmp_path / "double.so"),
        "LD_LIBRARY_PATH": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(double.nccl)!r})"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f"this libnccl has build-id {build_id}, the double was built for {'0' * 40}" in done.stderr


def test_fetching_again_does_nothing() -> None:
    done = subprocess.run([FETCH, sys.executable], env={**os.environ, "PIP_NO_INDEX": "1"}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


def test_fetching_without_an_index_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "testbed" / "nccl"
    folder.mkdir(parents=True)
    for name in ("fetch-wheels", "wheels.txt"):
        shutil.copy(FETCH.with_name(name), folder / name)
    done = subprocess.run(
        [folder / "fetch-wheels", sys.executable],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "make a Python package index reachable" in done.stderr
    assert [path for path in (tmp_path / ".venv").rglob("*") if path.is_file()] == []


def test_a_missing_library_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match=r"libnccl\.so\.2 is missing: run testbed/nccl/fetch-wheels"):
        nccl_library(repository=tmp_path)
