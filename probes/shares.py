"""Fair shares of what all tenants fill: places of a table, and what is remembered of things that have ended.

A table: whoever wants a place may hold as many as are free, the rule of the kernel's tables (probes/bpf/shares.h).  One
tenant alone comes to half of them, and whoever comes next has room of his own.

A memory, which forgets the oldest when it is full: it forgets the oldest of whoever fills most of it.  So a tenant who
ends things by the thousand pushes out his own.  The same rule serves routers, where a full buffer drops from the
longest queue (Suter, Lakshman, Stiliadis and Choudhury, "Design considerations for supporting TCP with per-flow
queueing", INFOCOM 1998).

Work of which only so much is done at a time: in turns, or in a round of each one's own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Who = TypeVar("Who", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")


class Places(Generic[Who]):
    """The places of one table.  Not thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: Counter[Who] = Counter()

    def room(self, who: Who) -> int:
        """How many places somebody may take now."""
        return max(0, self._free - self._held[who] + 1) // 2

    def take(self, who: Who) -> bool:
        """Take a place; False: there is none for him, who holds as many as are free."""
        if self._held[who] >= self._free:
            return False
        self._held[who] += 1
        self._free -= 1
        return True

    def leave(self, who: Who) -> None:
        """Give a place back that was taken."""
        self._held[who] -= 1
        self._free += 1
        if not self._held[who]:
            del self._held[who]


class FairMemory(Generic[Who, Key, Thing]):
    """Remembers the latest things, by key; not thread-safe, but `get` may be called from any thread."""

    def __init__(self, most: int, size_of: Callable[[Thing], int] = lambda _thing: 1) -> None:
        """`most`: of the sum of sizes."""
        self._most = most
        self._size_of = size_of
        self._things: dict[Key, tuple[Who, Thing]] = {}
        """The latest last."""
        self._keys: dict[Who, dict[Key, None]] = {}
        """Whose they are."""
        self._sizes: Counter[Who] = Counter()
        self._size = 0
        self._largest: list[tuple[int, int, Who]] = []
        """A heap of what each one fills, less than zero, with numbers that tell equals apart; some are out of date."""
        self._resized = 0

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[Key]:
        """Keys, the latest last."""
        return iter(self._things)

    def items(self) -> Iterator[tuple[Key, Thing]]:
        """The latest last."""
        return ((key, thing) for key, (_, thing) in self._things.items())

    def get(self, key: Key) -> Thing | None:
        """What is remembered; None: nothing is."""
        found = self._things.get(key)
        return None if found is None else found[1]

    def put(self, who: Who, key: Key, thing: Thing) -> list[tuple[Key, Thing]]:
        """Remember something; returns what was forgotten for it."""
        self.pop(key)
        self._things[key] = who, thing
        self._keys.setdefault(who, {})[key] = None
        self._resize(who, self._size_of(thing))
        forgotten = []
        while self._size > self._most:
            oldest = next(iter(self._keys[self._find_largest()]))
            forgotten.append((oldest, self._things[oldest][1]))
            self.pop(oldest)
        return forgotten

    def pop(self, key: Key) -> Thing | None:
        """Forget something, and return it; None: it was not remembered."""
        found = self._things.pop(key, None)
        if found is None:
            return None
        who, thing = found
        self._resize(who, -self._size_of(thing))
        own = self._keys[who]
        del own[key]
        if not own:
            del self._keys[who], self._sizes[who]
        return thing

    def _resize(self, who: Who, more: int) -> None:
        self._sizes[who] += more
        self._size += more
        self._resized += 1
        heappush(self._largest, (-self._sizes[who], self._resized, who))
        if len(self._largest) > 2 * len(self._sizes) + 64:
            self._largest = [(-size, -number, one) for number, (one, size) in enumerate(self._sizes.items())]
            heapify(self._largest)

    def _find_largest(self) -> Who:
        """Who fills most of it."""
        while True:
            size, _, who = self._largest[0]
            if who in self._keys and self._sizes[who] == -size:
                return who
            heappop(self._largest)


class Rounds(Generic[Who]):
    """Work on many things of which only so many are done at a time: each user's in a round of their own.

    Who has few things has all of them done each time; who has many waits for his own.  Where there are more users than
    may be done, those come first who have waited longest.  Not thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._next: dict[Who, int] = {}
        """Where each one's round goes on."""
        self._waited: dict[Who, int] = {}
        """Of whom nothing was done the last time, and how often so."""

    def choose(self, whose: Sequence[Who]) -> list[int]:
        """Which are done now, by their places, in order; `whose`: of each thing, in an order that stays."""
        if len(whose) <= self._most:
            self._waited = {}
            return list(range(len(whose)))
        places: defaultdict[Who, list[int]] = defaultdict(list)
        for place, who in enumerate(whose):
            places[who].append(place)
        chosen: list[int] = []
        following: dict[Who, int] = {}
        waited: dict[Who, int] = {}
        # Whoever has the fewest first: what they leave is for the others.
        ordered = sorted(places.items(), key=lambda one: (-self._waited.get(one[0], 0), len(one[1])))
        for at, (who, own) in enumerate(ordered):
            share = -(-(self._most - len(chosen)) // (len(places) - at))
            begin = self._next.get(who, 0) % len(own)
            mine = (own[begin:] + own[:begin])[:share]
            following[who] = begin + len(mine)
            chosen += mine
            if not mine:
                waited[who] = self._waited.get(who, 0) + 1
        self._next, self._waited = following, waited
        chosen.sort()
        return chosen


def shared_out(users: npt.NDArray[Any], most: int) -> npt.NDArray[np.int64]:
    """Places of `most` things: of each user as many, and of users with fewer all; in their order."""
    _users, whose, counts = np.unique(users, return_inverse=True, return_counts=True)
    allowed = np.zeros(len(counts), np.int64)
    left = most
    for rank, user in enumerate(counts.argsort(kind="stable").tolist()):
        # Rounded up: of more users than things those with the fewest have one each, and not those with the most.
        allowed[user] = min(int(counts[user]), -(-left // (len(counts) - rank)))
        left -= int(allowed[user])
    order = whose.argsort(kind="stable")
    within = np.arange(len(users)) - (counts.cumsum() - counts)[whose[order]]
    places: npt.NDArray[np.int64] = order[within < allowed[whose[order]]]
    places.sort()
    return places


def in_turns(things: Iterable[Thing], whose: Callable[[Thing], Hashable]) -> list[Thing]:
    """Things as they come, but each one's first before anybody's second."""
    turns: Counter[Hashable] = Counter()
    found = []
    for thing in things:
        who = whose(thing)
        found.append((turns[who], thing))
        turns[who] += 1
    found.sort(key=lambda one: one[0])
    return [thing for _, thing in found]
