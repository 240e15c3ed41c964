"""GPUs and NVLinks as the agent follows them. The driver's library is simulated (tests/nvml/stub.c)."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.agent.doctor.nvlink import check_nvlink
from railscope.agent.facts.hardware import NodeGpus, NvlinkFacts
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.nvlink import gpu as nvlink_gpu
from railscope.agent.node.nvlink import watch as nvlink
from railscope.agent.node.nvlink.watch import NvlinkWatch
from railscope.probes.clock import SystemClock
from railscope.probes.installation import remedy_for_missing_extra
from tests.nvml.stub import DRIVER_NOT_LOADED, GPU_IS_LOST, Stub, build_stub, link_lines

PERIOD_SECONDS = 0.01
PATIENCE_SECONDS = 60


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Not a claim about speed: the limit only ends a test that would wait for ever."""
    last = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < last, f"waited in vain until {what}"
        time.sleep(0.005)


@contextmanager
def watching(library: str, sysfs: Path) -> Iterator[NvlinkWatch]:
    watch = NvlinkWatch(SystemClock(), sysfs=sysfs, library=library, period_seconds=PERIOD_SECONDS)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


@pytest.fixture
def watch(stub: Stub, tmp_path: Path) -> Iterator[NvlinkWatch]:
    """Two GPUs with two links each; GPU 0 is next to NUMA node 1."""
    folder = tmp_path / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    stub.say("gpus 2", *link_lines(0, [0, 1]), *link_lines(1, [0, 1]))
    stub.count(0, 138, 0, 1000)
    with watching(stub.library, tmp_path) as watch:
        wait_until(lambda: len(watch.facts().nvlinks) == 4, "both GPUs are read")
        yield watch
        stub.say("release")


def link(facts: NodeGpus, gpu: int, number: int) -> NvlinkFacts:
    (found,) = [link for link in facts.nvlinks if (link.gpu, link.link) == (str(gpu), str(number))]
    return found


def success(collectors: Iterable[CollectorResult]) -> dict[str, bool]:
    return {result.collector: result.success for result in collectors}


def test_gpus_carry_what_joins_them_with_the_rest_of_the_node(watch: NvlinkWatch) -> None:
    first, second = watch.facts().devices
    assert (first.gpu, first.pci, first.numa, first.name) == ("0", "0000:1b:00.0", "1", "Simulated GPU")
    assert first.uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert (second.pci, second.numa) == ("0000:1c:00.0", "unknown")


def test_totals_begin_with_the_gpus_own_and_follow_the_counter(watch: NvlinkWatch, stub: Stub) -> None:
    assert link(watch.facts(), 0, 0).transmit_bytes == 1000 * 1024
    stub.count(0, 138, 0, 1500)
    wait_until(lambda: link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024, "the total has grown")
    assert link(watch.facts(), 0, 1).transmit_bytes == 0


def test_totals_stay_when_a_counter_is_reset_and_grow_from_there(watch: NvlinkWatch, stub: Stub) -> None:
    stub.count(0, 138, 0, 1500)
    wait_until(lambda: link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024, "the total has grown")
    stub.count(0, 138, 0, 10)
    stub.count(0, 161, 0, 4)  # read in the same call: seen, so the reset was too
    wait_until(lambda: ("replay", 4) in link(watch.facts(), 0, 0).errors, "the reset has been read")
    assert link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024
    stub.count(0, 138, 0, 13)
    wait_until(lambda: link(watch.facts(), 0, 0).transmit_bytes == 1503 * 1024, "the total grows again")


def test_a_lost_gpu_leaves_the_others_working_and_comes_back_with_its_totals(
    watch: NvlinkWatch, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "railscope")
    stub.count(0, 138, 0, 1500)
    wait_until(lambda: link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024, "the total has grown")
    stub.say(f"fail 0 {GPU_IS_LOST}")
    wait_until(lambda: link(watch.facts(), 0, 0).up is None, "the loss is noticed")
    assert success(watch.collectors()) == {"nvlink": True, "nvlink gpu0": False, "nvlink gpu1": True}
    assert link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024
    stub.count(1, 139, 1, 2)
    wait_until(lambda: link(watch.facts(), 1, 1).receive_bytes == 2048, "the other GPU is still read")
    stub.count(0, 138, 0, 90_000)  # while it was away: nobody knows from where it counted
    stub.say("fail 0 0")
    wait_until(lambda: success(watch.collectors())["nvlink gpu0"], "the GPU is read again")
    assert link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024
    said = [record.getMessage() for record in caplog.records if "gpu0" in record.getMessage()]
    assert all("GPU is lost" in one for one in said[:-1])
    assert said[:-1]
    assert "is read again" in said[-1]


def test_a_gpu_that_hangs_leaves_the_others_working_and_goes_on_by_itself(
    watch: NvlinkWatch, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvlink, "HANG_NS", 100_000_000)
    stub.say("hang 1")
    wait_until(lambda: link(watch.facts(), 1, 0).up is None, "the hang is noticed")
    assert success(watch.collectors()) == {"nvlink": True, "nvlink gpu0": True, "nvlink gpu1": False}
    assert link(watch.facts(), 0, 0).up is True
    stub.count(0, 138, 0, 1001)
    wait_until(lambda: link(watch.facts(), 0, 0).transmit_bytes == 1001 * 1024, "the other GPU is still read")
    stub.say("release")
    wait_until(lambda: link(watch.facts(), 1, 0).up is True, "the GPU is read again")


def test_closing_does_not_wait_for_a_gpu_that_hangs(watch: NvlinkWatch, stub: Stub) -> None:
    stub.say("hang 1")
    watch.close()  # the test's time limit is the proof
    assert not watch.alive


def test_a_driver_that_was_unloaded_is_opened_anew(watch: NvlinkWatch, stub: Stub) -> None:
    stub.count(0, 138, 0, 1500)
    wait_until(lambda: link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024, "the total has grown")
    stub.say(f"fail 0 {DRIVER_NOT_LOADED}", f"fail 1 {DRIVER_NOT_LOADED}", f"init {DRIVER_NOT_LOADED}")
    wait_until(lambda: success(watch.collectors()) == {"nvlink": False}, "the session is lost")
    stub.count(0, 138, 0, 3)
    stub.say("fail 0 0", "fail 1 0", "init 0")
    wait_until(
        lambda: all(success(watch.collectors()).values()) and len(watch.facts().nvlinks) == 4, "all is read again"
    )
    assert link(watch.facts(), 0, 0).transmit_bytes == 1500 * 1024


def test_a_link_down_is_shown_as_down(watch: NvlinkWatch, stub: Stub) -> None:
    stub.say("link 0 1 0 2 90")
    wait_until(lambda: link(watch.facts(), 0, 1).up is False, "the link is seen down")
    assert link(watch.facts(), 0, 0).up is True


def test_a_link_s_utilization_is_what_it_carried_of_what_its_speed_allows(watch: NvlinkWatch, stub: Stub) -> None:
    stub.count(0, 138, 0, 1500)
    wait_until(lambda: (link(watch.facts(), 0, 0).transmit_utilization or 0) > 0, "the bytes show as utilization")
    assert link(watch.facts(), 0, 0).receive_utilization == 0
    assert link(watch.facts(), 0, 1).transmit_utilization == 0


def test_the_refresh_rate_is_measured_once_something_flows(
    watch: NvlinkWatch, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.facts().devices[0].refresh_seconds is None
    monkeypatch.setattr(nvlink_gpu, "_REFRESH_AGAIN_NS", 0)
    stub.say("grow 0 138 0 1")
    wait_until(lambda: watch.facts().devices[0].refresh_seconds is not None, "the rate is known")
    assert watch.facts().devices[1].refresh_seconds is None


def test_without_the_library_nothing_is_shown_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "railscope")
    with watching("libnvidia-none.so.1", tmp_path) as watch:
        wait_until(lambda: bool(watch.why_no_nvml), "the library was looked for")
        assert (watch.facts(), watch.collectors()) == (NodeGpus(), ())
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_the_driver_that_hangs_at_the_start_is_a_failed_collector(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvlink, "HANG_NS", 100_000_000)
    stub.say("gpus 1", "hang -1")
    with watching(stub.library, tmp_path) as watch:
        wait_until(lambda: success(watch.collectors()) == {"nvlink": False}, "the hang is noticed")
        stub.say("release")
        wait_until(lambda: success(watch.collectors()) == {"nvlink": True, "nvlink gpu0": True}, "it goes on")


def test_another_process_reads_a_scripted_library(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("\n".join(["gpus 1", *link_lines(0, range(18)), "fabric 0 3 0", ""]))
    build_stub(tmp_path)
    program = (
        "from pathlib import Path; from railscope.probes.clock import SystemClock; "
        "from railscope.agent.doctor.nvlink import check_nvlink\n"
        "for finding in check_nvlink(Path('/sys'), SystemClock()): print(finding.status, finding.what)"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB_SCRIPT": str(script)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "ok driver 0.0.simulated: 1 GPU, 18 of 18 links up\n"


def test_a_gpu_that_fails_shows_in_its_own_collector_and_every_other_source_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script"
    lines = ["gpus 2", *link_lines(0, [0]), *link_lines(1, [0]), f"fail 0 {GPU_IS_LOST}", "field 1 138 0 0 3 1000"]
    script.write_text("\n".join([*lines, ""]))
    build_stub(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB_SCRIPT": str(script)}
    command = [
        sys.executable,
        "-m",
        "railscope.agent.cli.main",
        "agent",
        "--once",
        "--once.settle",
        "2s",
        "--no-collector.collective",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    success = dict(re.findall(r'^railscope_collector_success\{collector="(.*)"\} (.*)$', done.stdout, re.M))
    assert success["nvlink gpu0"] == "0"
    assert {value for name, value in success.items() if name != "nvlink gpu0"} == {"1"}
    assert success.keys() >= {"nvlink", "nvlink gpu1", "netdev"}
    assert 'railscope_nvlink_transmit_bytes_total{gpu="1",link="0"} 1024000' in done.stdout.splitlines()
    assert 'railscope_nvlink_up{gpu="0"' not in done.stdout
    assert "railscope_rail_transmit_bytes_total{" in done.stdout
    assert [line for line in done.stderr.splitlines() if "level=warn" in line and "nvlink gpu0" in line]


SICK = (
    *("gpus 2", *link_lines(0, [0]), *link_lines(1, [0])),
    *("fabric 0 3 1280", "joined 0 0 32766 a7", "fabric 1 3 5461", "joined 1 999 1 a7"),
    *("field 0 4 0 0 3 2", "field 0 144 0 0 1 1", "field 0 94 0 0 1 9", "field 0 230 0 0 1 1", "clocks 0 64"),
    *("field 1 3 0 0 3 0", "field 1 215 0 0 3 505", "field 1 220 0 0 3 780", "field 1 250 0 0 3 4"),
)


def test_a_sick_gpu_s_metrics_name_what_is_wrong_and_a_sound_reading_has_no_series(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("\n".join([*SICK, ""]))
    build_stub(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB_SCRIPT": str(script)}
    command = [sys.executable, "-m", "railscope.agent.cli.main", "agent", "--once", "--once.settle", "2s"]
    command += ["--no-collector.collective", "--no-collector.netdev"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    cluster = "a7a7a7a7-a7a7-a7a7-a7a7-a7a7a7a7a7a7"
    told = re.compile(
        r"^railscope_(gpu_fabric|gpu_ecc|gpu_row|gpu_rem|gpu_pcie_e|gpu_slow|gpu_rec|nvlink_(err|bit|fec)).*"
    )
    assert [line.removeprefix("railscope_") for line in done.stdout.splitlines() if told.match(line)] == [
        'gpu_fabric_unhealthy{gpu="0",reason="insufficient_nvlinks"} 1',
        'gpu_fabric_unhealthy{gpu="1",reason="degraded_bandwidth"} 1',
        'gpu_fabric_unhealthy{gpu="1",reason="route_recovery"} 1',
        'gpu_fabric_unhealthy{gpu="1",reason="route_unhealthy"} 1',
        'gpu_fabric_unhealthy{gpu="1",reason="access_timeout_recovery"} 1',
        'gpu_fabric_unhealthy{gpu="1",reason="insufficient_nvlinks"} 1',
        'gpu_fabric_unhealthy{gpu="1",reason="registration_failed"} 1',
        f'gpu_fabric_info{{gpu="0",fabric_cluster="{cluster}",clique="32766",state="completed"}} 1',
        f'gpu_fabric_info{{gpu="1",fabric_cluster="{cluster}",clique="1",state="completed"}} 1',
        'gpu_fabric_error{gpu="1"} 999',
        'gpu_fabric_health_mask{gpu="0"} 1280',
        'gpu_fabric_health_mask{gpu="1"} 5461',
        'gpu_ecc_errors_total{gpu="0",kind="uncorrected",since="volatile"} 2',
        'gpu_row_remap_pending{gpu="0"} 1',
        'gpu_pcie_errors_total{gpu="0",kind="replay"} 9',
        'gpu_slowed{gpu="0",reason="hardware_thermal"} 1',
        'gpu_recovery_action{gpu="0",action="gpu_reset"} 1',
        'nvlink_errors_total{gpu="1",link="0",kind="recovery_events"} 505',
        'nvlink_bit_error_ratio{gpu="1",link="0",kind="effective"} 3e-12',
        'nvlink_fec_blocks_total{gpu="1",link="0",corrected="15"} 4',
    ]
    program = (
        "from pathlib import Path; from railscope.probes.clock import SystemClock; "
        "from railscope.agent.doctor.nvlink import check_nvlink\n"
        "for finding in check_nvlink(Path('/sys'), SystemClock()): print(finding.status, finding.what)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [
        "problem GPU 0 (0000:1b:00.0): the fabric reports insufficient_nvlinks",
        "problem GPU 0 (0000:1b:00.0): 2 uncorrected memory errors since the driver was loaded",
        "problem GPU 0 (0000:1b:00.0): a row of its memory waits for a reset to be exchanged",
        "problem GPU 0 (0000:1b:00.0): its driver asks for gpu_reset",
        "problem GPU 1 (0000:1c:00.0): the fabric reports degraded_bandwidth, route_recovery, route_unhealthy, "
        "access_timeout_recovery, insufficient_nvlinks, registration_failed",
    ]


def test_a_gpu_that_hangs_is_named_by_a_single_look_which_ends_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("\n".join(["gpus 2", *link_lines(0, [0]), *link_lines(1, [0]), "hang 0", ""]))
    build_stub(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB_SCRIPT": str(script)}
    command = [
        sys.executable,
        "-m",
        "railscope.agent.cli.main",
        "agent",
        "--once",
        "--once.settle",
        "0s",
        "--no-collector.collective",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    (line,) = [line for line in done.stderr.splitlines() if "not read within" in line]
    assert 'within 5 s: nvlink gpu0"' in line
    assert 'railscope_collector_success{collector="nvlink gpu1"} 1' in done.stdout.splitlines()


class TestDoctor:
    def test_a_missing_library_is_one_note(self, tmp_path: Path) -> None:
        (finding,) = check_nvlink(tmp_path, SystemClock(), library="libnvidia-none.so.1")
        assert finding.status == "note"
        assert "libnvidia-none.so.1 cannot be loaded" in finding.what
        assert finding.remedy

    def test_missing_bindings_are_one_note_with_the_command(
        self, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        (finding,) = check_nvlink(tmp_path, SystemClock(), library=stub.library)
        assert (finding.status, finding.remedy) == ("note", remedy_for_missing_extra("nvlink"))

    def test_an_inactive_link_among_active_ones_is_a_problem(self, stub: Stub, tmp_path: Path) -> None:
        stub.say("gpus 1", *link_lines(0, range(4)), "link 0 2 0 2 90")
        summary, problem = check_nvlink(tmp_path, SystemClock(), library=stub.library)
        assert "1 GPU, 3 of 4 links up" in summary.what
        assert (problem.status, "inactive links: 2" in problem.what) == ("problem", True)

    def test_a_lost_gpu_is_a_problem_beside_the_others(self, stub: Stub, tmp_path: Path) -> None:
        stub.say("gpus 2", *link_lines(1, [0]), f"fail 0 {GPU_IS_LOST}")
        summary, problem = check_nvlink(tmp_path, SystemClock(), library=stub.library)
        assert "1 of 1 link up" in summary.what
        assert problem.what.startswith("GPU 0 cannot be read")

    def test_a_driver_that_hangs_does_not_hang_the_doctor(self, stub: Stub, tmp_path: Path) -> None:
        stub.say("gpus 1", "hang 0")
        (finding,) = check_nvlink(tmp_path, SystemClock(), library=stub.library, patience_seconds=0.1)
        assert finding.status == "problem"
        assert "has not answered" in finding.what

    def test_a_driver_that_is_not_loaded_is_a_problem(self, stub: Stub, tmp_path: Path) -> None:
        stub.say(f"init {DRIVER_NOT_LOADED}")
        (finding,) = check_nvlink(tmp_path, SystemClock(), library=stub.library)
        assert (finding.status, "Driver Not Loaded" in finding.what) == ("problem", True)
