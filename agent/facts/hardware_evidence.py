"""What of the node's hardware went wrong around a stall.  What failed just before it is the first thing to know.

It names no culprit: a card whose firmware was reset, or an XID, is told of with the stall whatever its cause is said to
be, because the two within minutes of each other are rarely two things.  The words are those of `/stalls`, of the socket
of verdicts and of `railscope diagnose`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.hardware import GpuFacts, NodeCondition
from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.facts.stall import Stall

BEFORE_SECONDS: Final = 120.0
"""Before the stall: NCCL notices a broken queue pair after its retries, half a minute or more."""
RECOVERED_STATE: Final = "LinkErrorRecovery"
"""Physical state of a port whose link is being recovered."""
HARMFUL_REASONS: Final = ("hardware", "hardware_thermal", "software_thermal", "power_brake")
"""What slows a GPU down though no job of its own does."""
_WORDS: Final = {
    "xid": "XID {code} of the GPU {pci}",
    "sxid": "SXid {code} of the NVSwitch {pci}",
    "pcie": "a {code} PCIe error of {pci}",
    "nic": "{code} of the network card {pci}",
    "machine_check": "a machine check ({code})",
    "gpu": "{code} of the GPU {pci}",
}
_BY_DRIVER: Final = frozenset({"xid", "sxid", "gpu"})
"""Kinds that NVIDIA's driver reports, in the kernel's log or by NVML."""


@dataclass(frozen=True, slots=True)
class HardwareEvidence:
    """Sentences on hardware, beside those that a stall has."""

    first: tuple[str, ...] = ()
    """What failed in the two minutes before the stall, the latest first, and what is wrong with the rail it blames."""
    last: tuple[str, ...] = ()
    """What failed since it began, and what is wrong with other rails: nothing of that can hide the cause."""


NO_HARDWARE_EVIDENCE: Final = HardwareEvidence()


@dataclass(frozen=True, slots=True)
class NodeHardware:
    """What is known of a host's hardware at one moment."""

    condition: NodeCondition = field(default_factory=NodeCondition)
    rails: tuple[RailFacts, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()


def find_hardware_evidence(hardware: NodeHardware, stall: Stall) -> HardwareEvidence:
    """What failed from two minutes before a stall until its end, and, of one that goes on, what is wrong now."""
    began = stall.since_realtime_ns / 1e9
    ended_ns = stall.ended_realtime_ns
    ended = float("inf") if ended_ns is None else ended_ns / 1e9
    told = [
        (at <= began, f"{what} {describe_moment(at - began)}")
        for at, what in sorted(_events(hardware.condition), reverse=True)
        if began - BEFORE_SECONDS <= at <= ended
    ]
    if ended_ns is None:
        told += _now(hardware, stall.diagnosis.rail)
    return HardwareEvidence(
        tuple(sentence for leads, sentence in told if leads), tuple(sentence for leads, sentence in told if not leads)
    )


def describe_event(kind: str, code: str, pci: str) -> str:
    """What was told of ill hardware, without when."""
    words = _WORDS.get(kind, "{code}").format(code=code.replace("_", " "), pci=pci)
    teller = "NVIDIA's driver" if kind in _BY_DRIVER else "the kernel's log"
    return f"{teller} told of {words}"


def describe_moment(seconds: float) -> str:
    """When something was, so many seconds after a stall began."""
    return f"{-seconds:.0f} s before the stall" if seconds < 0 else f"{seconds:.0f} s after the stall began"


def describe_recovery_of_link(rail: str, device: str) -> str:
    return f"the link of rail {rail} ({device}) is being recovered"


def describe_link_to_siblings(rail: str, device: str, of: str, ratio: float) -> str:
    """A link with fewer lanes, or a lower speed, than its siblings; `of`: `lanes` or `speed`."""
    less = f"has {ratio:.0%} of the lanes" if of == "lanes" else f"runs at {ratio:.0%} of the speed"
    return f"the link of rail {rail} ({device}) {less} of its siblings"


def describe_module_alarm(rail: str, device: str, lane: str, alarm: str) -> str:
    on = f" on lane {lane}" if lane else ""
    return f"the module of rail {rail} ({device}) reports {alarm.replace('_', ' ')}{on}"


def describe_pcie_lanes(device: str, pci: str, ratio: float) -> str:
    return f"the PCIe link of {device} ({pci}) has {ratio:.0%} of its lanes"


def describe_recovery_of_gpu(gpu: str, action: str) -> str:
    return f"the driver asks for {action.replace('_', ' ')} of GPU {gpu}"


def describe_slowed_gpu(gpu: str, reason: str) -> str:
    return f"the clocks of GPU {gpu} are held down ({reason.replace('_', ' ')})"


def _events(condition: NodeCondition) -> Iterator[tuple[float, str]]:
    for one in condition.events:
        if one.severity != "context":
            yield one.last_seconds, describe_event(one.kind, one.code, one.pci)


def _now(hardware: NodeHardware, blamed: str) -> Iterator[tuple[bool, str]]:
    """What is wrong at this moment, and whether it is with the blamed rail, by number: a rail's port and its network
    device have names of their own."""
    for rail in hardware.rails:
        if rail.physical_state == RECOVERED_STATE:
            yield rail.rail == blamed, describe_recovery_of_link(rail.rail, rail.device)
        for of, ratio in (("lanes", rail.lanes_to_siblings), ("speed", rail.speed_to_siblings)):
            if ratio is not None and ratio < 1:
                yield rail.rail == blamed, describe_link_to_siblings(rail.rail, rail.device, of, ratio)
                break  # fewer lanes are slower, too
    for module in hardware.condition.modules:
        for lane, alarm in module.alarms:
            if not alarm.endswith("_warning"):
                yield module.rail == blamed, describe_module_alarm(module.rail, module.device, lane, alarm)
    blamed_pci = {rail.pci for rail in hardware.rails if rail.rail == blamed and rail.pci}
    for link in hardware.condition.pcie:
        if link.lanes is not None and link.lanes_possible and link.lanes < link.lanes_possible:
            sentence = describe_pcie_lanes(link.device, link.pci, link.lanes / link.lanes_possible)
            yield link.pci in blamed_pci, sentence
    for gpu in hardware.gpus:
        if gpu.recovery_action not in (None, "none"):
            yield False, describe_recovery_of_gpu(gpu.gpu, str(gpu.recovery_action))
        for reason in gpu.slowed_by or ():
            if reason in HARMFUL_REASONS:
                yield False, describe_slowed_gpu(gpu.gpu, reason)
