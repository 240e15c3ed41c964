"""What of the node's hardware went wrong just before a stall: the first thing that whoever reads of it should know.

It names no culprit: a card whose firmware was reset, or an XID, is told of with the stall whatever its cause is said to
be, because the two within minutes of each other are rarely two things.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def hardware_before(condition: NodeCondition, rails: tuple[RailFacts, ...], stall: Stall) -> tuple[str, ...]:
    """Sentences on hardware that failed from two minutes before a stall until its end, the latest first."""
    began = stall.since_realtime_ns / 1e9
    ended_ns = stall.ended_realtime_ns
    ended = float("inf") if ended_ns is None else ended_ns / 1e9
    return (
        *(
            f"the kernel's log told of {what} {_when(at - began)}"
            for at, what in sorted(_events(condition), reverse=True)
            if began - _BEFORE_SECONDS <= at <= ended
        ),
        *(_now(condition, rails) if ended_ns is None else ()),
    )


def _events(condition: NodeCondition) -> Iterator[tuple[float, str]]:
    for one in condition.events:
        if one.severity != "context":
            yield one.last_seconds, _WORDS.get(one.kind, "{code}").format(code=one.code.replace("_", " "), pci=one.pci)


def _now(condition: NodeCondition, rails: tuple[RailFacts, ...]) -> Iterator[str]:
    """What is wrong at this moment, of a stall that goes on."""
    for rail in rails:
        if rail.physical_state == "LinkErrorRecovery":
            yield f"the link of rail {rail.rail} ({rail.device}) is being recovered"
    for module in condition.modules:
        for lane, alarm in module.alarms:
            if not alarm.endswith("_warning"):
                on = f" on lane {lane}" if lane else ""
                yield f"the module of rail {module.rail} ({module.device}) reports {alarm.replace('_', ' ')}{on}"


def _when(seconds: float) -> str:
    return f"{-seconds:.0f} s before the stall" if seconds < 0 else f"{seconds:.0f} s after the stall began"
