"""Whether GPUs and NVLinks can be read on this host, tried for real."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from railscope.agent.doctor.findings import Finding, Status
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.hardware import GpuFacts
from railscope.agent.node.nvlink.gpu import Gpu, GpuHistories
from railscope.probes.clock import Clock
from railscope.probes.nvlink.nvml import LIBRARY, NvmlError, NvmlMissing, NvmlSession

_CHECK: Final = "NVLink"
_PATIENCE_SECONDS: Final = 10.0
_DRIVER_LOG: Final = "look for NVRM in the kernel log: dmesg | grep NVRM"


def check_nvlink(
    sysfs: Path, clock: Clock, *, library: str = LIBRARY, patience_seconds: float = _PATIENCE_SECONDS
) -> list[Finding]:
    """One finding where there is no NVML or it refuses; one for the host and one for each ill GPU where it answers.

    `library` is as in `NvmlSession.open`.  A driver that hangs is given `patience_seconds`.
    """
    findings: list[Finding] = []
    look = threading.Thread(
        target=lambda: findings.extend(_examine(sysfs, clock, library)), name="doctor-nvlink", daemon=True
    )
    look.start()
    look.join(patience_seconds)
    if look.is_alive():
        what = f"the NVIDIA driver has not answered for {patience_seconds:.0f} s"
        return [Finding(_CHECK, "problem", what, f"{_DRIVER_LOG}; --no-collector.nvlink skips it")]
    return findings


def _examine(sysfs: Path, clock: Clock, library: str) -> list[Finding]:
    try:
        session = NvmlSession.open(library)
    except NvmlMissing as missing:
        return [Finding(_CHECK, "note", f"GPUs and NVLinks are not read: {missing}", missing.remedy)]
    except NvmlError as error:
        return [Finding(_CHECK, "problem", f"NVML does not initialise: {error}", _DRIVER_LOG)]
    try:
        return _gpus(session, sysfs, clock)
    except NvmlError as error:
        return [Finding(_CHECK, "problem", str(error), _DRIVER_LOG)]
    finally:
        session.close()


def _gpus(session: NvmlSession, sysfs: Path, clock: Clock) -> list[Finding]:
    findings = []
    links = up = 0
    count = session.gpu_count()
    histories = GpuHistories()
    for index in range(count):
        gpu = Gpu(index, session, clock, sysfs=sysfs, histories=histories)
        try:
            gpu.read()
        except NvmlError as error:
            findings.append(Finding(_CHECK, "problem", f"GPU {index} cannot be read: {error}", _DRIVER_LOG))
            continue
        numbered = [link for link in gpu.links if link.up is not None]
        links += len(numbered)
        up += sum(link.up is True for link in numbered)
        down = [link.link for link in numbered if not link.up]
        if down and len(down) < len(numbered):
            what = f"GPU {index} ({gpu.gpu.pci}): inactive links: {', '.join(down)}"
            findings.append(Finding(_CHECK, "problem", what, f"nvidia-smi nvlink --status -i {index}; {_DRIVER_LOG}"))
        if gpu.gpu.fabric_unhealthy:
            what = f"GPU {index} ({gpu.gpu.pci}): the fabric reports {', '.join(gpu.gpu.fabric_unhealthy)}"
            findings.append(
                Finding(_CHECK, "problem", what, "look at the fabric manager: systemctl status nvidia-fabricmanager")
            )
        findings += [
            Finding(_CHECK, "problem", f"GPU {index} ({gpu.gpu.pci}): {what}", remedy)
            for what, remedy in _complaints(gpu.gpu)
        ]
    if count == 0:
        return [Finding(_CHECK, "note", f"driver {session.driver_version()}: no GPU is visible")]
    status: Status = "note" if links == 0 else "ok"
    gpus = format_count(count, "GPU")
    seen = f"{gpus}, {up} of {format_count(links, 'link')} up" if links else f"{gpus} without NVLink"
    return [Finding(_CHECK, status, f"driver {session.driver_version()}: {seen}"), *findings]


def _complaints(gpu: GpuFacts) -> Iterator[tuple[str, str]]:
    """(what a GPU says is wrong with it, what to do)."""
    drain = "drain the host and reset the GPU: nvidia-smi --gpu-reset"
    uncorrected = sum(count for kind, since, count in gpu.ecc_errors if (kind, since) == ("uncorrected", "volatile"))
    if uncorrected:
        yield f"{format_count(uncorrected, 'uncorrected memory error')} since the driver was loaded", drain
    if gpu.remap_failed:
        yield "a row of its memory could not be exchanged for a spare one", "replace the GPU"
    elif gpu.remap_pending:
        yield "a row of its memory waits for a reset to be exchanged", drain
    if gpu.recovery_action not in (None, "none"):
        yield f"its driver asks for {gpu.recovery_action}", _DRIVER_LOG
