"""The page that tells which operations each rank's end of a communicator gave to NCCL.

The series of a communicator carry no op, because ranks times ops would be too many of them; one who looks at a single
node wants to know all the same.
"""

from __future__ import annotations

import json

from railscope.agent.facts.label_numbers import number_of
from railscope.agent.facts.snapshot import Snapshot


def communicators_json(snapshot: Snapshot) -> bytes:
    """Calls and payload by operation since railscope first saw each communicator; ended ones are left out.

    Ranks are numbers, null where they are not known; so is `sequence`, the collectives that a rank entered since the
    communicator was made as NCCL numbers them.
    """
    document = {
        "simulated": snapshot.simulated,
        "communicators": [
            {
                "comm": one.comm,
                "rank": number_of(one.rank),
                "nranks": number_of(one.nranks),
                "pid": one.pid,
                "sequence": one.position,
                "ops": [{"op": op.op, "calls": op.calls, "payload_bytes": op.payload_bytes} for op in one.ops],
            }
            for one in snapshot.communicators
            if one.alive
        ],
    }
    return json.dumps(document, indent=1).encode() + b"\n"
