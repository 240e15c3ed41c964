"""Whether the ranks of a communicator make the same collectives.

NCCL asks all ranks to make the same collectives in the same order, with the same count, data type and root.  Where they
do not the job hangs, or goes on with wrong data and nothing says so.  The programs keep what each communicator's
collectives were (probes/nccl/programs/shapes.py).  Ranks of this host are compared here.  For those of other hosts one
of them tells a checkpoint, and so do those that differ from it: the signature of the last full block of collectives,
which is the same on all ranks that made the same ones.

The length of the block follows from the rate of the communicator's whole life, which is the same on all of its ranks:
short-lived rates differ from one to the other, and ranks that tell blocks of different lengths cannot be compared.

Collectives are numbered by the agent's own count, so that only ranks that were seen from their first call on have
checkpoints.  Where a rank of this host was not, the last collectives of a communicator that stands are numbered as NCCL
does (agent/node/collectives/sequences.py), if all of them are such as it numbers.  Where the arguments of a call may
have been lost nothing is compared: what is not known is not said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import Disagreement, LastCollectives, find_disagreement
from railscope.agent.node.collectives.communicators import Communicator
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.nccl.memory.sequence_numbers import FUNCTIONS
from railscope.probes.nccl.programs.shapes import WINDOW, Block, Shape, block_from_word
from railscope.probes.nccl.records.calls import BLOCK_LEVELS

_log = logging.getLogger("railscope.agreement")

_LASTS_SECONDS: Final = 60
"""So long a checkpoint stands at least, so that all hosts are scraped within it."""
_PLACE_BITS: Final = 17
"""Of a block's number, told beside 4 bits of its length and 32 of its signature: a float64 holds 53 exactly."""
_TOLD: Final = 16
"""Collectives of a rank that is stalled, for hosts that cannot see each other's: a label of half a kilobyte."""
_NONE_LEFT: Final[Mapping[int, LastCollectives[str]]] = MappingProxyType({})
_NUMBERS: Final = np.uint64((1 << 32) - 1)


class Shapes(Protocol):
    """What the programs keep of collectives (probes/nccl/programs/shapes.py)."""

    def blocks(self, instances: Sequence[int]) -> npt.NDArray[np.uint64]: ...
    def recent(self, instance: int, calls: int) -> tuple[int, tuple[int, ...]] | None: ...


class Agreement:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        shapes: Shapes,
        calls_of: Callable[[int], int | None],
        position_of: Callable[[int, int], int | None] = lambda _instance, _calls: None,
    ) -> None:
        """`calls_of` knows by instance how many calls a communicator has made by now; None: unknown.

        It may raise KernelRefusal.  `position_of` knows NCCL's number of the last of so many calls; None: unknown.
        """
        self._shapes = shapes
        self._calls_of = calls_of
        self._position_of = position_of
        self._lost: Mapping[int, int] = {}
        """Calls whose arguments could not be read, by pid; which communicators they were of is unknown."""
        self._doubtful: set[int] = set()
        """Instances that such a call may have belonged to."""
        self._signatures: dict[int, int] = {}
        self._said: set[str] = set()
        """Communicators whose ranks were found to differ and the log has it."""
        self._living: tuple[Communicator, ...] = ()
        """As of the last update."""
        self._compared: tuple[Communicator, ...] = ()
        """Those of them that are compared, ranks in their order."""
        self._instances: tuple[int, ...] = ()
        self._first_places: tuple[int, ...] = ()
        """By communicator: the place among these of its first rank."""
        self._beside = np.zeros(0, np.intp)
        """Of each of these: the place of the one that it is compared with."""

    def signature(self, instance: int) -> int | None:
        """A rank's checkpoint, as `comm_signature` shows it; None: another rank tells it, or it is unknown."""
        return self._signatures.get(instance)

    def update(self, living: tuple[Communicator, ...], lost: Mapping[int, int], now_ns: int) -> None:
        """Compare the ranks of this host, and bring checkpoints up to date; call it once a second or so.

        `living` are the communicators that have not ended, the same object while they are as they were; `lost` counts
        calls whose arguments could not be read, by pid: what a process lost makes nothing of another's unknown.
        """
        fresh = {pid for pid, calls in lost.items() if self._lost.get(pid) != calls}
        self._lost = lost
        if fresh:
            self._doubtful.update(one.instance for one in living if one.tgid in fresh)
        if fresh or living is not self._living:
            self._choose(living)
        self._signatures = {}
        compared, beside = self._compared, self._beside
        if not compared:
            return
        words = self._shapes.blocks(self._instances)
        for at in self._first_places:
            block = _checkpoint(words[at], now_ns - compared[at].first_ns)
            if block is not None:
                self._signatures[compared[at].instance] = pack(block)
        firsts = words[beside]
        differs = ((words & _NUMBERS) == (firsts & _NUMBERS)) & (words != firsts)
        for at in np.flatnonzero(differs.any(axis=1)).tolist():
            self._differ(compared[beside[at]], compared[at], words[at], differs[at])

    def _choose(self, living: tuple[Communicator, ...]) -> None:
        """Choose the ranks that are compared, each with the first of its communicator."""
        compared = sorted(
            (one for one in living if one.whole and self._is_comparable(one)), key=lambda one: one.rank or 0
        )
        places: dict[str, int] = {}
        self._beside = np.array([places.setdefault(one.name, at) for at, one in enumerate(compared)], np.intp)
        self._living, self._compared = living, tuple(compared)
        self._instances, self._first_places = tuple(one.instance for one in compared), tuple(places.values())
        self._said &= places.keys()

    def find(
        self, ranks: Iterable[Communicator], left: Mapping[int, LastCollectives[str]] = _NONE_LEFT
    ) -> Disagreement | None:
        """The first of the last collectives in which ranks of one communicator differ, if they make no call now.

        None: they do not differ, or that is unknown.  `left`: what those that have left called last, by rank.
        """
        ends = list(ranks)
        late = not all(one.whole for one in ends)
        known: dict[int, LastCollectives[int]] = {}
        for one in ends:
            last = self._last(one, as_nccl_numbers=late)
            if last is not None and one.rank is not None:
                known[one.rank] = last
        found = find_disagreement(known, _describe)
        if found is not None or late or not left:
            return found
        told = {rank: LastCollectives(one.last, tuple(map(_describe, one.shapes))) for rank, one in known.items()}
        return find_disagreement({**left, **told}, str)

    def last(self, one: Communicator) -> LastCollectives[str] | None:
        """The last few collectives of a communicator that makes no call now, or has just ended; None: unknown."""
        found = self._last(one) if one.whole else None
        return None if found is None else LastCollectives(found.last, tuple(map(_describe, found.shapes[-_TOLD:])))

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        self._doubtful.difference_update(instances)

    def _is_comparable(self, one: Communicator) -> bool:
        return one.nranks != 1 and one.rank is not None and one.name != UNKNOWN and one.instance not in self._doubtful

    def _last(self, one: Communicator, *, as_nccl_numbers: bool = False) -> LastCollectives[int] | None:
        """The last collectives of a communicator; None: it makes calls just now, or they are unknown.

        `as_nccl_numbers`: unknown too where NCCL's number of the last one is, or one of them has no number there.
        """
        if not self._is_comparable(one):
            return None
        try:
            calls = self._calls_of(one.instance)
            recent = None if calls is None else self._shapes.recent(one.instance, calls)
            if calls is None or recent is None or self._calls_of(one.instance) != calls:
                return None
        except KernelRefusal as refusal:
            _log.debug("the calls of communicator %s cannot be read: %s", one.name, refusal.strerror)
            return None
        if not as_nccl_numbers:
            return LastCollectives(*recent)
        number = self._position_of(one.instance, calls)
        if number is None or not all(map(_is_numbered, recent[1])):
            return None
        return LastCollectives(number, recent[1])

    def _differ(
        self, first: Communicator, other: Communicator, words: npt.NDArray[np.uint64], differs: npt.NDArray[np.bool_]
    ) -> None:
        """Two ranks of this host made different collectives in blocks of some lengths: `differs`, by level.

        The log has each communicator once.
        """
        told = self._signatures.get(first.instance)
        level = None if told is None else told >> _PLACE_BITS + 32
        if level is not None and differs[level]:
            block = block_from_word(level, int(words[level]))
            if block is not None:
                self._signatures[other.instance] = pack(block)
        shortest = int(np.flatnonzero(differs)[0])
        block = block_from_word(shortest, int(words[shortest]))
        if first.name in self._said or block is None:
            return
        self._said.add(first.name)
        exactly = self.find((first, other))
        _log.warning(
            "communicator %s: ranks %s and %s do not make the same collectives: they differ between collective %d and "
            "%d, in operation, data type, bytes, root or order%s (processes %d and %d)",
            *(first.name, first.rank, other.rank, block.last - (WINDOW << shortest) + 1, block.last),
            "" if exactly is None else f": {exactly.sentence}",
            *(first.tgid, other.tgid),
        )


def pack(block: Block) -> int:
    """A checkpoint as one number below 2^53: the block's length and number above 32 bits of signature."""
    number = (block.last >> (WINDOW.bit_length() - 1 + block.level)) & ((1 << _PLACE_BITS) - 1)
    return (block.level << _PLACE_BITS | number) << 32 | block.signature


def _checkpoint(row: npt.NDArray[np.uint64], life_ns: int) -> Block | None:
    """The block that a communicator of this age tells of."""
    shortest = block_from_word(0, int(row[0]))
    if shortest is None:
        return None
    wanted = shortest.last * _LASTS_SECONDS * 1_000_000_000 // max(life_ns, 1)
    level = min((max(wanted - 1, 0) // WINDOW).bit_length(), BLOCK_LEVELS - 1)
    return block_from_word(level, int(row[level]))


def _describe(word: int) -> str:
    return str(Shape.from_word(word))


def _is_numbered(word: int) -> bool:
    """Whether NCCL's sequence numbers count such a collective (probes/nccl/memory/sequence_numbers.py)."""
    shape = Shape.from_word(word)
    return shape.op < FUNCTIONS and shape.payload_bytes > 0
