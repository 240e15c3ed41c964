"""Recordings for tests: with something of everything.  Simulated: the values are made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from railscope.agent.facts.clocks import ClockReading
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.agent.recording.recording import (
    KINDS,
    Mark,
    RecordedCommunicator,
    RecordedOwner,
    RecordedRail,
    RecordedStall,
    Recording,
)
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op

SECOND_NS = 1_000_000_000
BEGAN_NS = 1_000 * SECOND_NS
REALTIME_NS = 1_800_000_000 * SECOND_NS
"""The time of day at monotonic time 0."""


def records(kind: str, count: int, **fields: object) -> Records:
    """Records of one kind, a millisecond apart from the beginning of the window on."""
    made = np.zeros(count, KINDS[kind])
    if "time_ns" in (KINDS[kind].names or ()):
        made["time_ns"] = BEGAN_NS + np.arange(count, dtype=np.uint64) * 1_000_000
    for name, value in fields.items():
        made[name] = value
    return made


def stall(comm: str = "00c0ffee00c0ffee") -> RecordedStall:
    return RecordedStall(
        comm=comm,
        rank="3",
        nranks="4",
        pid=4711,
        op="AllReduce",
        peer="",
        cause="rail_down",
        strength="strong",
        since_realtime_ns=REALTIME_NS,
        seconds=2.5,
        blamed_rank="",
        blamed_pid=0,
        rail="1",
        device="mlx5_1",
        evidence=("mlx5_1 lost its carrier 2.6 s ago",),
    )


def recording(reason: str = "stall", calls: int = 100) -> Recording:
    """60 s of a host that makes 100 calls."""
    arrays = {kind: records(kind, 0) for kind in KINDS} | {
        "calls": records(
            "calls",
            calls,
            instance=7,
            tgid=4711,
            op=int(Op.AllReduce),
            payload_bytes=1 << 20,
            sequence=np.arange(calls),
        ),
        "completions": records("completions", 3, instance=7, tgid=4711, duration_ns=[1_000_000, 2_000_000, 6_000_000]),
        "rail_samples": records("rail_samples", 3, transmit_bytes=[100, 300, 50], receive_bytes=[1, 2, 3]),
        "link_events": records("link_events", 2, up=[1, 0], present=1),
        "losses": records("losses", 2, calls=[5, 8]),
        "open_operations": records("open_operations", 1, instance=7),
    }
    clock = ClockReading(BEGAN_NS, BEGAN_NS + REALTIME_NS, 200, True, 3_000_000, 500_000)
    return Recording(
        railscope="1.2.3",
        host="gpu-01",
        boot_id="0c0ffee0",
        kernel="6.6.1",
        simulated=True,
        reason=reason,
        began_ns=BEGAN_NS,
        ended_ns=BEGAN_NS + 60 * SECOND_NS,
        clocks=(
            clock,
            replace(clock, monotonic_ns=BEGAN_NS + SECOND_NS, realtime_ns=BEGAN_NS + SECOND_NS + REALTIME_NS),
        ),
        communicators=(
            RecordedCommunicator(
                instance=7,
                identity=RankIdentity(
                    comm="00c0ffee00c0ffee",
                    rank="3",
                    nranks="4",
                    gpu="0",
                    node_rank="0",
                    local_ranks="2",
                    nccl_version="2.27.3",
                    pid=4711,
                    netns="",
                    job=(("job", "pretrain"), ("user", "ada")),
                    identity_source="layout",
                ),
                enqueued=1200,
                completed=1199,
                inflight_seconds=None,
                alive=True,
            ),
        ),
        rails=(
            RecordedRail(
                *(0, "eth2", "0", "", 4026531840, "0000:18:00.0", "mlx5_core", 50_000_000_000),
                owners=(
                    RecordedOwner("transmit", "nccl", "collective", 250, 0.02),
                    RecordedOwner("receive", "unknown", "foreign", 2, None),
                ),
            ),
        ),
        complete_from_ns=dict.fromkeys(KINDS, BEGAN_NS) | {"calls": BEGAN_NS + 12 * SECOND_NS},
        stalls=(stall(),) if reason == "stall" else (),
        marks=(Mark(BEGAN_NS + 5, "a stall began"),),
        arrays=arrays,
    )
