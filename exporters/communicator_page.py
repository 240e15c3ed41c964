"""The page that tells which operations each rank's end of a communicator gave to NCCL.

The series of a communicator carry no op, because ranks times ops would be too many of them; one who looks at a single
node wants to know all the same.
"""

from __future__ import annotations

import json

from agent.snapshot import Snapshot


def communicators_json(snapshot: Snapshot) -> bytes:
    """Calls and payload by operation since railscope first saw each communicator; ended ones are left out."""
    document = {
        "simulated": snapshot.simulated,
        "communicators": [
            {
                "comm": one.comm,
                "rank": one.rank,
                "nranks": one.nranks,
                "pid": one.pid,
                "ops": [{"op": op.op, "calls": op.calls, "payload_bytes": op.payload_bytes} for op in one.ops],
            }
            for one in snapshot.communicators
            if one.alive
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
