"""What each process did with each of its peers: rows of the kernel's table, named and added up.

A process's operation is told of whole or not at all: its busiest peers by name, the others as one sum.  So whoever
keeps what was told before has the whole again where the new rows take the place of all the old ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.transfers import PeerTransfers
from railscope.agent.node.transfers.totals import histogram_of
from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.loading.maps import Records
from railscope.probes.transfers.functions import OPERATIONS

MOST_PEERS: Final = 64
"""Of one process that are told of by name: the busiest."""
MOST_PAIRS: Final = 512
"""Of one user's processes and peers that are told of: those of the operations that moved most."""

LifeOf = Callable[[int], int]
"""Which of the processes that had a pid, one after the other, has it now, or had it last."""
NameOf = Callable[[int, int, int], str]
"""What a library calls a peer, by pid, function and the number that stands for it; empty: it has no name."""
Pairs = tuple[PeerTransfers, ...]
"""Of one process and operation, the busiest first; together they are all that it did."""

_WITH_NAMES: Final = np.array([one.library is not CommunicationLibrary.UCX for one in OPERATIONS])
"""By number: UCX has endpoints, which have no name."""


def pairs_of(keys: Records, totals: Records, name_of: NameOf, life_of: LifeOf) -> tuple[tuple[int, Pairs], ...]:
    """Pairs by process and operation, those that moved most first, from rows of dtype TRANSFER_KEY and TRANSFER_TOTAL.

    With in whose share each is (probes/bpf/answerable.h).  Of one user so many: who starts processes by the thousand
    costs others no more.
    """
    rows: dict[tuple[int, int], dict[str, list[int]]] = {}
    of_process: Counter[int] = Counter()
    named = _have_names(keys)
    for at in np.flatnonzero(named)[np.argsort(totals["bytes"][named], kind="stable")[::-1]].tolist():
        pid, function = int(keys["tgid"][at]), int(keys["function"][at])
        name = name_of(pid, function, int(keys["peer"][at])) if of_process[pid] < MOST_PEERS else ""
        if not name:
            named[at] = False
            continue
        of_process[pid] += 1
        rows.setdefault((pid, function), {}).setdefault(name, []).append(at)
    rest = np.flatnonzero(~named & (keys["function"] < len(OPERATIONS)))
    places, which, counts = np.unique(keys[rest][["tgid", "function"]], return_inverse=True, return_counts=True)
    groups = np.split(rest[np.argsort(which, kind="stable")], np.cumsum(counts)[:-1])
    for place, group in zip(places.tolist(), groups, strict=bool(len(places))):
        rows.setdefault(place, {})[""] = group.tolist()
    moved, uids = totals["bytes"].tolist(), totals["uid"].tolist()

    def bytes_of(several: list[int]) -> int:
        return sum(moved[at] for at in several)

    of_user: Counter[int] = Counter()
    found = []
    for (pid, function), peers in sorted(rows.items(), key=lambda one: -sum(map(bytes_of, one[1].values()))):
        user = uids[next(iter(peers.values()))[0]]
        if of_user[user] + len(peers) <= MOST_PAIRS:
            of_user[user] += len(peers)
            ordered = sorted(peers.items(), key=lambda one: -bytes_of(one[1]))
            life = life_of(pid)
            pairs = tuple(_peer_transfers(pid, life, function, name, totals[some]) for name, some in ordered)
            found.append((user, pairs))
    return tuple(found)


def _have_names(keys: Records) -> npt.NDArray[np.bool_]:
    """Rows whose peer may have a name."""
    functions = np.minimum(keys["function"], len(OPERATIONS) - 1)
    found: npt.NDArray[np.bool_] = _WITH_NAMES[functions] & (keys["function"] < len(OPERATIONS))
    return found


def _peer_transfers(pid: int, life: int, function: int, peer: str, rows: Records) -> PeerTransfers:
    """The sum of some rows of one process and function."""
    operation = OPERATIONS[function]
    totals = {name: sum(rows[name].tolist()) for name in ("operations", "bytes", "completed", "failed", "sum_ns")}
    done = totals["completed"] - totals["failed"]
    return PeerTransfers(
        library=operation.library.value,
        op=operation.op,
        direction=operation.direction.value,
        pid=pid,
        peer=peer,
        operations=totals["operations"],
        payload_bytes=totals["bytes"] if operation.sized else None,
        completed=done,
        failed=totals["failed"],
        seconds=totals["sum_ns"] / 1e9,
        durations=histogram_of(rows["buckets"].sum(axis=0).tolist(), totals["sum_ns"]) if done else None,
        life=life,
    )
