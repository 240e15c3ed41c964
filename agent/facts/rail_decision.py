"""Whether a network device is a rail, and why."""

from __future__ import annotations

from dataclasses import dataclass

from railscope.probes.netdev.inventory import NetworkDevice


@dataclass(frozen=True, slots=True)
class RailDecision:
    """What one device is, and why."""

    device: NetworkDevice
    rail: str | None
    """The rail's number; None: not a rail."""
    reason: str
    requested: bool = False
    """Only the settings of jobs make it a rail: it is none once they have ended."""
    carries: bool = True
    """Whether collectives of the jobs that run may use it; False: they chose other devices."""
