"""The page that tells of stalls in words: what goes on now, with its evidence, and what ended lately."""

from __future__ import annotations

import json
from typing import Any

from railscope.agent.facts.label_numbers import number_of
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.facts.stall import Stall


def stalls_json(snapshot: Snapshot) -> bytes:
    """`stalls` that go on, `ended` the last ones; times are nanoseconds since 1970, lengths seconds.

    Ranks are numbers, null where they are not known or nobody is blamed.
    """
    current = [one.current for one in snapshot.stalls if one.current is not None]
    document = {
        "simulated": snapshot.simulated,
        "stalls": [_stall(stall, snapshot) for stall in current],
        "ended": [_stall(stall, snapshot) for stall in snapshot.ended_stalls],
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _stall(stall: Stall, snapshot: Snapshot) -> dict[str, Any]:
    blame = stall.blame
    return {
        "comm": stall.comm,
        "rank": number_of(stall.rank),
        "nranks": number_of(stall.nranks),
        "pid": stall.pid,
        "op": stall.op,
        "payload_bytes": stall.payload_bytes,
        "cause": blame.cause.value,
        "strength": stall.strength,
        "since_realtime_ns": stall.since_realtime_ns,
        "flagged_realtime_ns": stall.flagged_realtime_ns,
        "ended_realtime_ns": stall.ended_realtime_ns,
        "seconds": stall.length_ns(snapshot.monotonic_ns) / 1e9,
        "blamed_rank": blame.blamed_rank,
        "rail": blame.rail,
        "device": blame.device,
        "netns": blame.netns,
        "evidence": list(blame.evidence),
    }
