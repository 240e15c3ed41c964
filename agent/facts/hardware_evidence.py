"""What of the node's hardware went wrong around a stall.  What failed just before it is the first thing to know.

It names no culprit: a card whose firmware was reset, or an XID, is told of with the stall whatever its cause is said to
be, because the two within minutes of each other are rarely two things.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.snapshot import NodeCondition, RailFacts
from railscope.agent.facts.stall import Stall

_BEFORE_SECONDS: Final = 120.0
"""Before the stall: NCCL notices a broken queue pair after its retries, half a minute or more."""
_WORDS: Final = {
    "xid": "XID {code} of the GPU {pci}",
    "sxid": "SXid {code} of the NVSwitch {pci}",
    "pcie": "a {code} PCIe error of {pci}",
    "nic": "{code} of the network card {pci}",
    "machine_check": "a machine check ({code})",
}


@dataclass(frozen=True, slots=True)
class HardwareEvidence:
    """Sentences on hardware, beside those that a stall has."""

    first: tuple[str, ...]
    """What failed in the two minutes before the stall, the latest first, and what is wrong with the rail it blames."""
    last: tuple[str, ...]
    """What failed since it began, and what is wrong with other rails: nothing of that can hide the cause."""


def find_hardware_evidence(condition: NodeCondition, rails: tuple[RailFacts, ...], stall: Stall) -> HardwareEvidence:
    """What failed from two minutes before a stall until its end, and, of one that goes on, what is wrong now."""
    began = stall.since_realtime_ns / 1e9
    ended_ns = stall.ended_realtime_ns
    ended = float("inf") if ended_ns is None else ended_ns / 1e9
    told = [
        (at <= began, f"the kernel's log told of {what} {_when(at - began)}")
        for at, what in sorted(_events(condition), reverse=True)
        if began - _BEFORE_SECONDS <= at <= ended
    ]
    if ended_ns is None:
        # By number: a rail's port and its network device have names of their own.
        told += [(rail == stall.diagnosis.rail, sentence) for rail, sentence in _now(condition, rails)]
    return HardwareEvidence(
        tuple(sentence for leads, sentence in told if leads), tuple(sentence for leads, sentence in told if not leads)
    )


def _events(condition: NodeCondition) -> Iterator[tuple[float, str]]:
    for one in condition.events:
        if one.severity != "context":
            yield one.last_seconds, _WORDS.get(one.kind, "{code}").format(code=one.code.replace("_", " "), pci=one.pci)


def _now(condition: NodeCondition, rails: tuple[RailFacts, ...]) -> Iterator[tuple[str, str]]:
    """What is wrong at this moment, by rail."""
    for rail in rails:
        if rail.physical_state == "LinkErrorRecovery":
            yield rail.rail, f"the link of rail {rail.rail} ({rail.device}) is being recovered"
    for module in condition.modules:
        for lane, alarm in module.alarms:
            if not alarm.endswith("_warning"):
                on = f" on lane {lane}" if lane else ""
                sentence = f"the module of rail {module.rail} ({module.device}) reports {alarm.replace('_', ' ')}{on}"
                yield module.rail, sentence


def _when(seconds: float) -> str:
    return f"{-seconds:.0f} s before the stall" if seconds < 0 else f"{seconds:.0f} s after the stall began"
