"""Faults and controls drawn by chance: kind, library, hosts, place, rail, size and moment.

The same seed draws the same scenarios; what they do to a machine that is busy otherwise still differs from run to run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from railscope.testbed.job import Instead, Moments, SkippedCall
from tests.faults.scenarios import CRAWL_MBIT, NEVER_MS, OF_THE_JOB, Kind, Library, Load, Scenario, control, fault

_KINDS: Final = (
    Kind.STOP,
    Kind.KILL,
    Kind.LINK_DOWN,
    Kind.SLOW,
    Kind.SLOW_IN_SWITCH,
    Kind.FILTER,
    Kind.FILTER_IN_SWITCH,
    Kind.STARVE,
    Kind.SKIP,
    Kind.REPLACE,
    Kind.FREEZE,
    Kind.LARGE_DROPPED,
    Kind.NO_PEER,
)
_NCCL_KINDS: Final = (Kind.NO_SPLIT, Kind.RECEIVES, Kind.CIRCLE, Kind.KILL_HOST)
"""What only the real library's ranks do."""
_OF_THE_LAST: Final = frozenset({Kind.NO_PEER, Kind.NO_SPLIT})
"""The rank that comes late to a call is the last one."""
_SIZES_BYTES: Final = (512 << 10, 1 << 20, 2 << 20)
"""Large enough to be cut over both rails in a ring of four."""
_PACES_US: Final = (20_000, 40_000, 80_000)
_SLOW_SIZES_BYTES: Final = (1 << 20, 2 << 20)
_SLOW_PACES_US: Final = (20_000, 40_000)
"""Where a rail becomes slow: what is smaller or rarer goes through the shaper's bucket (128 kB) at full speed."""
_LONGEST_MOMENT_SECONDS: Final = 1.0
_WARM_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """A scenario and when its fault comes."""

    scenario: Scenario
    moment_seconds: float
    """Later than the scenario says."""


def random_scenarios(count: int, seed: int) -> tuple[Drawn, ...]:
    """So many faults and so many controls, in turn: a run that is ended early has had as many of either."""
    chance = random.Random(seed)
    faults = [_fault(chance, number) for number in range(count)]
    controls = [_control(chance, number) for number in range(count)]
    return tuple(drawn for pair in zip(faults, controls, strict=True) for drawn in pair)


def _where(chance: random.Random) -> tuple[Library, int]:
    """Four ranks of the real NCCL that wait would starve each other on a small machine: their proxies spin."""
    library, hosts = chance.choice(list(Library)), chance.choice((2, 2, 4))
    return library, 2 if library is Library.NCCL else hosts


def _fault(chance: random.Random, number: int) -> Drawn:
    library, hosts = _where(chance)
    kind = chance.choice(_KINDS + (_NCCL_KINDS if library is Library.NCCL else ()))
    host = hosts - 1 if kind in _OF_THE_LAST else chance.randrange(hosts)
    slow = kind in (Kind.SLOW, Kind.SLOW_IN_SWITCH)
    sizes_bytes, paces_us = (_SLOW_SIZES_BYTES, _SLOW_PACES_US) if slow else (_SIZES_BYTES, _PACES_US)
    load = Load(size_bytes=chance.choice(sizes_bytes), pace_us=chance.choice(paces_us))
    # What the job itself does comes with its call, which is not to be before the watching has begun.
    moment_seconds = 0.0 if kind in OF_THE_JOB else chance.uniform(0, _LONGEST_MOMENT_SECONDS)
    load = _with_its_fault(load, kind, host, chance.randrange(100, 170))
    scenario = fault(
        kind,
        library,
        hosts,
        f"{number + 1}. {kind.value}",
        loads=(load,),
        host=host,
        rail=chance.randrange(2),
        warm_seconds=1.0 if kind in OF_THE_JOB else _WARM_SECONDS,
        fault_seconds=30.0,
    )
    return Drawn(scenario, moment_seconds)


def _with_its_fault(load: Load, kind: Kind, rank: int, call: int) -> Load:
    """What the job itself does wrong: nothing, where something happens to it."""
    match kind:
        case Kind.SKIP:
            return replace(load, skip=SkippedCall(rank, call))
        case Kind.REPLACE:
            return replace(load, skip=SkippedCall(rank, call, Instead.REPLACE))
        case Kind.CIRCLE:
            return replace(load, pattern="sendrecv", skip=SkippedCall(rank, call, Instead.RECEIVE))
        case Kind.NO_PEER:
            return replace(load, late_ms=NEVER_MS)
        case Kind.NO_SPLIT:
            return replace(load, pattern="split-late", warm_up_ms=NEVER_MS)
        case Kind.RECEIVES:
            return replace(load, pattern="receive-first")
        case Kind.KILL_HOST:
            return replace(load, ranks_per_host=2)
        case _:
            return load


def _control(chance: random.Random, number: int) -> Drawn:
    library, hosts = _where(chance)
    pace_us = chance.choice(_PACES_US)
    every = 2_000_000 // pace_us
    loads = {
        "compute phases": Load(pace_us=pace_us, pause=Moments(every, chance.randrange(3000, 10000))),
        "checkpoints": Load(pace_us=pace_us, checkpoint=Moments(every, chance.randrange(1000, 4500))),
        "warm-up": Load(pace_us=pace_us, warm_up_ms=chance.randrange(1000, 4500)),
        "job end": Load(pace_us=pace_us, iterations=every, destroy=chance.random() < 0.5),
        "slow ring": Load(size_bytes=chance.choice((8 << 20, 24 << 20)), pace_us=0),
        "small collectives": Load(size_bytes=chance.choice((256, 4096)), pace_us=pace_us // 4),
        "steady": Load(size_bytes=chance.choice(_SIZES_BYTES), pace_us=pace_us),
    }
    name = chance.choice(sorted(loads))
    scenario = control(
        f"{number + 1}. {name}",
        library,
        hosts,
        loads=(loads[name],),
        line_mbit=CRAWL_MBIT if name == "slow ring" else None,
        warm_seconds=0.5 if name in ("warm-up", "job end") else 2.0,
        fault_seconds=chance.uniform(6.0, 10.0),
    )
    return Drawn(scenario, 0.0)
