"""Facts of a rank, its process and its rails, as a look for stalls finds them: healthy until a test says otherwise.

What they show is simulated, after real faults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from railscope.agent.facts.stall import InFlight, OwnHistory
from railscope.agent.node.stalls.evidence import Evidence, ProcessFacts, RailSigns, RankFacts

SECOND_NS: Final = 1_000_000_000
MIB: Final = 1 << 20
WINDOW_NS: Final = 1_500_000_000
"""How long processes and rails were watched."""

USUAL: Final = OwnHistory(1000, 5e6, 6e6, 5e6)
FLIGHT: Final = InFlight("AllReduce", MIB, 0, "strong", "handed to the network and not complete", calls_before=99)
WEAK: Final = InFlight("AllReduce", None, 0, "weak", "bytes lie unread")
RANK: Final = RankFacts(7, "00000000000000ab", 3, 8, 4711, 100, 99, 5000, FLIGHT)
"""Rank 3 of 8, in its hundredth operation."""
PEER: Final = replace(RANK, instance=8, rank=4, pid=4712)
"""Another rank of the same host, in the same operation."""

PROCESS: Final = ProcessFacts("running", WINDOW_NS, 0.1, 0.0, 0, 0)
"""Sleeps."""
STOPPED: Final = replace(PROCESS, condition="stopped")
STARVED: Final = replace(PROCESS, waited_ratio=2.0, busy_ratio=0.01)
COMPUTES: Final = replace(PROCESS, busy_ratio=1.0)
WRITES: Final = replace(PROCESS, written_bytes=100 * MIB)

RAIL0: Final = RailSigns("0", "rail0", "", up=True, window_ns=WINDOW_NS, connections=2, speed_bytes_per_second=10**10)
RAIL1: Final = replace(RAIL0, rail="1", device="rail1")
CALM: Final = Evidence(PROCESS, (RAIL0, RAIL1), ())
"""Nothing is wrong."""


def with_rail1(**signs: Any) -> Evidence:
    """Only the second rail shows something."""
    return replace(CALM, rails=(RAIL0, replace(RAIL1, **signs)))


def with_rails(first: dict[str, Any], second: dict[str, Any]) -> Evidence:
    return replace(CALM, rails=(replace(RAIL0, **first), replace(RAIL1, **second)))


def with_process(process: ProcessFacts, evidence: Evidence = CALM) -> Evidence:
    return replace(evidence, process=process)


def with_peers(*peers: tuple[RankFacts, ProcessFacts], evidence: Evidence = CALM) -> Evidence:
    """Other ranks of the host, with their processes."""
    return replace(
        evidence,
        peers=tuple(peer for peer, _ in peers),
        peer_processes={peer.pid: process for peer, process in peers},
    )
