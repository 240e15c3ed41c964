"""What the agent exports of GPUs, PCIe and NVLinks, beside nvidia-smi.  A machine's lack is absence, not 0."""

from __future__ import annotations

import re
import subprocess
from typing import Final

from tests.fabric.agent_process import AgentProcess
from tests.gpu.lane import Lane, nvidia_smi
from tests.gpu.table import Verdict

_SERIES: Final = (
    "railscope_gpu_info",
    "railscope_gpu_pcie_transmit_bytes_total",
    "railscope_gpu_pcie_receive_bytes_total",
    "railscope_nvlink_info",
    "railscope_nvlink_up",
    "railscope_nvlink_transmit_bytes_total",
    "railscope_nvlink_receive_bytes_total",
    "railscope_nvlink_errors_total",
    "railscope_gpu_nvlink_speed_bytes_per_second",
)
_READ_SECONDS: Final = 8.0
_PINNED_BYTES: Final = 256 << 20
_COPIES: Final = 8
_COPY_BYTES: Final = _PINNED_BYTES * _COPIES


def run(lane: Lane) -> None:
    for name, arguments in (
        ("query", ["-q"]),
        ("nvlink", ["nvlink", "--status"]),
        ("nvlink-counters", ["nvlink", "-gt", "d"]),
        ("topology", ["topo", "-m"]),
    ):
        try:
            (lane.folder / f"nvidia-smi-{name}.txt").write_text(nvidia_smi(*arguments))
        except (OSError, subprocess.SubprocessError) as error:
            lane.rows.add(f"nvidia-smi {' '.join(arguments)}", str(error), verdict=Verdict.ABSENT)
    with lane.agent("nvml", "--series.detail", "nvlinks") as agent:
        agent.comes_true(lambda: bool(agent.samples("railscope_gpu_info")), _READ_SECONDS)
        for name in _SERIES:
            found = agent.samples(name)
            lane.rows.add(f"{name}: series", str(len(found)) if found else "absent")
        for part in (_gpus, _links, _pcie):
            with lane.attempt(part.__name__.strip("_")):
                part(lane, agent)
        lane.keep_metrics(agent)


def _gpus(lane: Lane, agent: AgentProcess) -> None:
    query = nvidia_smi("--query-gpu=index,uuid,pci.bus_id,name", "--format=csv,noheader")
    known = sorted(_gpu(*line.split(", ")) for line in query.strip().splitlines())
    shown = sorted(
        _gpu(labels["gpu"], labels["uuid"], labels["pci"], labels["name"])
        for labels, _ in agent.samples("railscope_gpu_info")
    )
    lane.rows.compared("GPUs: index, uuid, bus id, name", shown, known)


def _gpu(index: str, uuid: str, pci: str, name: str) -> list[str]:
    """nvidia-smi writes a domain of eight digits in capitals, sysfs one of four in small letters."""
    return [index, uuid, pci.lower()[-12:], name]


def _links(lane: Lane, agent: AgentProcess) -> None:
    try:
        status = nvidia_smi("nvlink", "--status")
    except (OSError, subprocess.SubprocessError) as error:
        lane.rows.add("NVLinks", f"nvidia-smi: {error}", verdict=Verdict.ABSENT)
        return
    active = len(re.findall(r"Link \d+: [\d.]+ GB/s", status))
    up = sum(value for _, value in agent.samples("railscope_nvlink_up"))
    lane.rows.compared("NVLinks that are active", int(up), active)
    if active == 0:
        # No link carries anything: a counter that shows 0 would claim to have been read.
        zeros = [labels for labels, _ in agent.samples("railscope_nvlink_transmit_bytes_total")]
        lane.rows.compared("series of bytes on links that are not there", len(zeros), 0)


def _pcie(lane: Lane, agent: AgentProcess) -> None:
    """A copy of known size to the GPU must have gone over PCIe."""
    if lane.simulated:
        lane.rows.add("PCIe bytes of a copy of 2 GiB to the GPU", "no GPU to copy to", verdict=Verdict.ABSENT)
        return
    import torch

    def received() -> float | None:
        return next((value for _, value in agent.samples("railscope_gpu_pcie_receive_bytes_total", gpu="0")), None)

    first = received()
    if first is None:
        lane.rows.add("PCIe bytes of a copy of 2 GiB to the GPU", "no such series", verdict=Verdict.ABSENT)
        return
    host = torch.zeros(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(_COPIES):
        device.copy_(host)
    torch.cuda.synchronize()
    agent.comes_true(lambda: (received() or 0.0) - first >= _COPY_BYTES, _READ_SECONDS)
    moved = (received() or 0.0) - first
    lane.rows.figure("PCIe bytes of a copy of 2 GiB to the GPU, over its size", moved / _COPY_BYTES)
