"""Sums the bytes that each rank sends to each other rank of its communicator, from its calls.

Wire bytes follow from the exact counts of calls (agent/node/collectives/call_counts.py), of which the kernel keeps the
peer or root anyway: nothing more is observed for them, and nothing was measured on links.  A rank's own calls say what
it sends:

| Operation                | A rank of n sends, for a payload of b bytes            | Basis |
|--------------------------|--------------------------------------------------------|-------|
| Send, PutSignal          | to the peer b                                          | call  |
| AllToAll                 | to every other rank b                                  | call  |
| Scatter                  | the root to every other rank b                         | call  |
| Gather                   | every rank but the root to the root b                  | call  |
| AllReduce                | to the next rank 2b(n−1)/n                             | ring  |
| AllGather, ReduceScatter | to the next rank (n−1)b                                | ring  |
| Broadcast                | to the next rank b, but nothing where that is the root | ring  |
| Reduce                   | to the next rank b, but the root nothing               | ring  |
| Recv, Signal, WaitSignal | nothing: counted at the sender; a flag of a few bytes  |       |
| others                   | nothing is known                                       |       |

The basis says how sure the peer is.  `call`: the call names it, and the bytes are exact.  `ring`: a single ring in the
order of ranks, as agent/model/ring.py has it.  However NCCL's rings run, what a rank sends in all is the same; to
whom is not: where a host has several ranks, rings may take other orders, and several at once.  With two ranks there is
no other order, and with one rank on each host NCCL takes this one.  Trees and switches that reduce use other pairs.

Bytes to ranks of the same host are included.  What replays of CUDA graphs send is not in it, since no call
is made for them, nor what a rank does that cannot be told by its number.  Each rank shows at most so many peers of
basis `call`, those that it sent to first, and its other peers together: a peer that has a series keeps it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from railscope.agent.facts.snapshot import PeerTotal
from railscope.agent.model.ring import RING_OPS, ring_share
from railscope.agent.node.collectives.call_counts import CallCount
from railscope.agent.node.collectives.communicators import Communicator
from railscope.probes.nccl.abi import Op, op_name

OTHER: Final = "other"
"""The peer that stands for all without a series of their own."""
CALL: Final = "call"
RING: Final = "ring"

_RINGS: Final = frozenset(Op[name] for name in RING_OPS)
_CALLS: Final = frozenset({Op.Send, Op.PutSignal, Op.AllToAll, Op.Scatter, Op.Gather})


class _Kind(NamedTuple):
    """What payload is added up by."""

    instance: int
    op: int
    peer: int
    """Root or peer."""


class PeerBytes:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, most_peers: int, communicator_of: Callable[[int], Communicator | None]) -> None:
        """`most_peers`: of one rank in one communicator; `communicator_of` knows instances until they are forgotten."""
        self._most_peers = most_peers
        self._communicator_of = communicator_of
        self._folded: defaultdict[_Kind, int] = defaultdict(int)
        self._shown: defaultdict[int, dict[int, None]] = defaultdict(dict)
        """Peers that have a series, by instance, in the order in which they got it."""

    def fold(self, counts: Iterable[CallCount]) -> None:
        """Keep what rows say that were taken out of the kernel's table."""
        _add(self._folded, counts)

    def forget(self, instances: Collection[int]) -> None:
        """Nobody can ask about these communicators any more."""
        gone = set(instances)
        for kind in [kind for kind in self._folded if kind.instance in gone]:
            del self._folded[kind]
        for instance in gone:
            self._shown.pop(instance, None)

    def totals(self, counts: Iterable[CallCount]) -> tuple[PeerTotal, ...]:
        """What was folded and what these rows say; no total ever falls while its communicator is known."""
        payloads = self._folded.copy()
        _add(payloads, counts)
        by_instance: defaultdict[int, list[tuple[_Kind, int]]] = defaultdict(list)
        for kind, payload_bytes in payloads.items():
            by_instance[kind.instance].append((kind, payload_bytes))
        return tuple(
            total
            for instance, sums in by_instance.items()
            if (communicator := self._communicator_of(instance)) is not None
            for total in self._of_end(communicator, sums)
        )

    def _of_end(self, communicator: Communicator, sums: Iterable[tuple[_Kind, int]]) -> Iterator[PeerTotal]:
        rank, nranks = communicator.rank, communicator.nranks
        if communicator.comm_hash is None or rank is None or nranks is None or not 0 <= rank < nranks:
            return
        named: defaultdict[int, int] = defaultdict(int)
        everyone = following = 0
        for kind, payload_bytes in sums:
            match kind.op:
                case Op.AllToAll:
                    everyone += payload_bytes
                case Op.Scatter:
                    everyone += payload_bytes if kind.peer == rank else 0
                case Op.Send | Op.PutSignal | Op.Gather:
                    if 0 <= kind.peer < nranks and kind.peer != rank:
                        named[kind.peer] += payload_bytes
                case _:
                    share = ring_share(op_name(kind.op), nranks, rank, kind.peer)
                    following += payload_bytes * share.numerator // share.denominator
        if following:
            yield PeerTotal(communicator.name, str(rank), str((rank + 1) % nranks), RING, following)
        shown = self._shown[communicator.instance]
        for peer in sorted(named, key=lambda peer: (-named[peer], peer)):
            if len(shown) < self._most_peers:
                shown.setdefault(peer)
        if everyone:
            for step in range(1, nranks):
                if len(shown) >= self._most_peers:
                    break
                shown.setdefault((rank + step) % nranks)
        others = sum(named.values()) + everyone * (nranks - 1)
        for peer in shown:
            sent = named[peer] + everyone
            others -= sent
            if sent:
                yield PeerTotal(communicator.name, str(rank), str(peer), CALL, sent)
        if others:
            yield PeerTotal(communicator.name, str(rank), OTHER, CALL, others)


def _add(payloads: defaultdict[_Kind, int], counts: Iterable[CallCount]) -> None:
    for count in counts:
        kind = count.kind
        if kind.op in _RINGS or kind.op in _CALLS:
            payloads[_Kind(kind.instance, kind.op, kind.peer)] += count.payload_bytes
