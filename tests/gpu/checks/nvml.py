"""What the agent exports of GPUs, PCIe and NVLinks, beside nvidia-smi.  A machine's lack is absence, not 0."""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import closing
from statistics import median
from typing import Final

from railscope.probes.clock import SystemClock
from railscope.probes.nvlink.gpu_events import GpuEvents
from railscope.probes.nvlink.gpu_health import GpuHealthReader
from railscope.probes.nvlink.links import GpuLinks
from railscope.probes.nvlink.nvml import NvmlError, NvmlSession, Questions
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
_CONDITION: Final = (
    "railscope_gpu_ecc_errors_total",
    "railscope_gpu_remapped_rows",
    "railscope_gpu_row_remap_pending",
    "railscope_gpu_row_remap_failed",
    "railscope_gpu_pcie_errors_total",
    "railscope_gpu_slowed",
    "railscope_gpu_recovery_action",
    "railscope_gpu_fabric_info",
    "railscope_nvlink_bit_error_ratio",
    "railscope_nvlink_fec_blocks_total",
    "railscope_pcie_link_ratio",
    "railscope_hardware_events_total",
)
"""Shown where there is something to show: absent is no error."""
_READ_SECONDS: Final = 8.0
_FIELDS: Final = range(1, 300)
_NEWEST: Final = range(213, 251)
"""Recoveries, error rates, corrections and actions, which NVLink 5 and its drivers brought."""
_READS: Final = 50
_MOST_SHOWN: Final = 4
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
        for name in _CONDITION:
            found = agent.samples(name)
            shown = ", ".join(f"{' '.join(labels.values())}: {value:g}" for labels, value in found[:_MOST_SHOWN])
            lane.rows.add(f"{name}: samples", shown or "absent")
        for part in (_gpus, _links, _condition, _pcie):
            with lane.attempt(part.__name__.strip("_")):
                part(lane, agent)
        lane.keep_metrics(agent)
    with lane.attempt("fields"):
        _fields(lane)
    with lane.attempt("events"):
        _events(lane)


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


def _condition(lane: Lane, agent: AgentProcess) -> None:
    """What nvidia-smi says of the same; `[N/A]` there is absence here."""
    for question, name, labels in (
        ("ecc.errors.corrected.volatile.total", "gpu_ecc_errors_total", {"kind": "corrected", "since": "volatile"}),
        ("ecc.errors.uncorrected.volatile.total", "gpu_ecc_errors_total", {"kind": "uncorrected", "since": "volatile"}),
        ("ecc.errors.corrected.aggregate.total", "gpu_ecc_errors_total", {"kind": "corrected", "since": "aggregate"}),
    ):
        told = nvidia_smi(f"--query-gpu={question}", "--format=csv,noheader").strip().splitlines()[0]
        shown = [value for _, value in agent.samples(f"railscope_{name}", gpu="0", **labels)]
        known = [float(told)] if told.strip().isdigit() else []
        lane.rows.compared(f"nvidia-smi {question}", shown, known)


def _fields(lane: Lane) -> None:
    """Every field value that NVML knows of the first GPU and its first link, raw; and what reading costs."""
    with closing(NvmlSession.open()) as session:
        gpu = session.handle(0)
        lines = []
        told: dict[str, list[int]] = {"GPU": [], "link 0": []}
        # A scope of 0 is the first link of a field that is told by link, and nothing to others.
        for field in _FIELDS:
            try:
                answer = session.field_values(gpu, Questions([(field, 0)]))
            except NvmlError as error:
                lines.append(f"{field}: the call fails: {error}")
                continue
            lines.append(f"{field}: code {answer.codes[0]}, value {answer.values[0]}, 64 bits {answer.wide[0]}")
            if answer.codes[0] == 0:
                told["GPU" if field < min(_NEWEST) else "link 0"].append(field)
        (lane.folder / "nvml-fields.txt").write_text("\n".join(lines) + "\n")
        newest = [field for field in told["link 0"] if field in _NEWEST]
        lane.rows.add("NVML fields with a value", f"{sum(map(len, told.values()))} of {len(_FIELDS)}")
        lane.rows.add("NVML fields 213 to 250 with a value", " ".join(map(str, newest)) or "none")
        _fabric_and_clocks(lane, session, gpu)
        _costs(lane, session, gpu)


def _fabric_and_clocks(lane: Lane, session: NvmlSession, gpu: object) -> None:
    for what, ask in (("fabric", session.fabric), ("clock event reasons", session.clock_event_reasons)):
        try:
            lane.rows.add(f"NVML: {what}", str(ask(gpu)))
        except NvmlError as error:
            lane.rows.add(f"NVML: {what}", str(error), verdict=Verdict.ABSENT)


def _costs(lane: Lane, session: NvmlSession, gpu: object) -> None:
    """Wall time, as the driver may ask the GPU; medians of the readings that the agent makes."""
    links = GpuLinks(session, gpu, SystemClock())
    health = GpuHealthReader(session, gpu)
    links.read()
    health.read(links.numbers)
    events = GpuEvents(session, [0], SystemClock())
    for what, read in (
        ("NVLinks and bytes", links.read),
        ("condition", lambda: health.read(links.numbers)),
        ("events, none of them", events.read),
    ):
        times = []
        for _ in range(_READS):
            began_ns = time.perf_counter_ns()
            read()
            times.append((time.perf_counter_ns() - began_ns) / 1e6)
        lane.rows.figure(f"one reading of one GPU's {what}, ms", median(times))
        lane.rows.figure(f"one reading of one GPU's {what}, ms, the longest", max(times))
    events.close()


def _events(lane: Lane) -> None:
    with closing(NvmlSession.open()) as session:
        try:
            kinds = session.supported_events(session.handle(0))
            lane.rows.add("NVML: kinds of events that GPU 0 can tell", f"{kinds:#x}")
            with closing(GpuEvents(session, [0], SystemClock())) as events:
                lane.rows.add("NVML: GPUs that events are registered for", str(events.gpus))
                lane.rows.add("NVML: events since then", str(events.read()))
        except NvmlError as error:
            lane.rows.add("NVML: events", str(error), verdict=Verdict.ABSENT)


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
