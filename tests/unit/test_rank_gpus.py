"""Which of the host's GPUs a rank uses.  NVML's list and what NCCL says are simulated."""

from __future__ import annotations

from typing import Final

import pytest

from railscope.agent.facts.hardware import GpuFacts, format_pci_bus_id
from railscope.agent.facts.rank_identity import NO_GPU, RankGpu
from railscope.agent.node.collectives.rank_gpus import RankGpus, format_nccl_bus_id
from railscope.agent.node.targets.jobs import is_confined

BARE, CONTAINER = 10, 11
FIFTH: Final = RankGpu("5", "GPU-5", "00000000:9B:00.0")


def gpu(number: int, pci: str) -> GpuFacts:
    return GpuFacts(str(number), f"GPU-{number}", pci, "H200", "0", "completed", (), None, None, None)


@pytest.fixture
def gpus() -> RankGpus:
    return RankGpus(lambda tgid: tgid != BARE)


@pytest.mark.parametrize(
    ("bus_id", "written"),
    [
        (0x1B000, "00000000:1B:00.0"),
        (0xC8010, "00000000:C8:01.0"),
        (0x10000_01_00_0, "00010000:01:00.0"),  # PCI domains of virtual machines have more than 16 bits
        (0x2_04_00_0, "00000002:04:00.0"),
    ],
)
def test_nccls_number_of_a_pci_function_is_written_as_dcgm_writes_it(bus_id: int, written: str) -> None:
    assert format_nccl_bus_id(bus_id) == written


def test_sysfs_s_address_is_written_as_dcgm_writes_it_and_what_is_none_stays() -> None:
    assert format_pci_bus_id("0000:1b:00.0") == "00000000:1B:00.0"
    assert format_pci_bus_id("10000:01:00.0") == "00010000:01:00.0"
    for none in ("unknown", "", "1b:00.0", "0000:1b:00", "0000:xx:00.0"):
        assert format_pci_bus_id(none) == none


@pytest.mark.parametrize("tgid", [BARE, CONTAINER])
def test_a_gpu_that_a_container_calls_0_has_the_number_that_the_host_gives_it(gpus: RankGpus, tgid: int) -> None:
    assert gpus.set_host_gpus((gpu(0, "0000:1b:00.0"), gpu(5, "0000:9b:00.0")))
    assert gpus.find(tgid, 0x9B000, nvml_dev=0) == FIFTH


def test_a_gpu_that_nvml_does_not_list_has_an_address_and_no_number(gpus: RankGpus) -> None:
    gpus.set_host_gpus((gpu(0, "0000:1b:00.0"),))
    assert gpus.find(BARE, 0x9B000, nvml_dev=0) == RankGpu(pci_bus_id="00000000:9B:00.0")
    assert gpus.find(BARE, None, nvml_dev=0) == NO_GPU


def test_without_the_hosts_nvml_only_the_number_of_a_process_that_nothing_confines_counts(gpus: RankGpus) -> None:
    assert gpus.find(BARE, 0x9B000, nvml_dev=5) == RankGpu("5", pci_bus_id="00000000:9B:00.0")
    assert gpus.find(CONTAINER, 0x9B000, nvml_dev=0) == RankGpu(pci_bus_id="00000000:9B:00.0")
    assert gpus.find(CONTAINER, None, nvml_dev=0) == NO_GPU
    assert gpus.find(BARE, None, nvml_dev=None) == NO_GPU


def test_a_gpu_that_was_not_read_yet_is_none_of_the_hosts(gpus: RankGpus) -> None:
    assert not gpus.set_host_gpus((gpu(0, "unknown"),))
    assert gpus.set_host_gpus((gpu(0, "0000:1b:00.0"),))
    assert not gpus.set_host_gpus((gpu(0, "0000:1b:00.0"),))


@pytest.mark.parametrize(
    "path",
    [
        "/system.slice/slurmstepd.scope/job_4711/step_0/user/task_3",
        f"/kubepods/burstable/pod0a1b2c3d-1111-2222-3333-445566778899/{'3f' * 32}",
        f"/system.slice/docker-{'3f' * 32}.scope",
        "/pbs_jobs.service/jobid/12.head",
        "/machine.slice/machine-gpu.scope/payload",
        "/lxc.payload.trainer/user.slice",
    ],
)
def test_what_containers_and_batch_systems_start_may_see_a_part_of_the_gpus(path: str) -> None:
    assert is_confined(f"0::{path}\n")


def test_what_a_user_starts_at_a_terminal_sees_all_gpus() -> None:
    assert not is_confined("0::/user.slice/user-1000.slice/session-1.scope\n")
    assert is_confined(None), "nothing is known of it"
