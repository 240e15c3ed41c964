"""Which of NCCL's internal functions are probed, beyond the entry points, and at which level.

The functions are not exported: a library without `.symtab` has none of them, and what they tell is then left out.
Names: `.symtab` of the published libraries 2.18.1 to 2.32.3; a function appears under the first name that is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.prologue import PROLOGUE_BYTES, probe_offset


class Level(IntEnum):
    """How much is observed; each level includes those before it."""

    WATCH = -1
    """No call meets a probe: NCCL's own numbers of collectives are read from communicators, where it has them."""
    COUNTS = 0
    """Calls at the entry points."""
    COMPLETION = 1
    """What the proxy thread completes: durations, progress of each communicator."""
    RAILS = 2
    """Every message that is handed to a network device."""
    ALL = 3
    """Every kernel launch, also of collectives that use no network."""


@dataclass(frozen=True, slots=True)
class InternalFunction:
    """One probed function; `program` names the BPF program (probes/bpf/nccl_internals.bpf.c)."""

    program: str
    level: Level
    arguments: int
    """How many of its leading arguments the program reads."""
    symbols: tuple[str, ...]


_SIZE_IS_INT: Final = 1 << 28
_INT_SENDS: Final = frozenset({"_Z18ncclNetSocketIsendPvS_iiS_PS_"})

FUNCTIONS: Final = (
    # Stops first, as they are attached in this order: what is posted before stops are seen would never complete.
    InternalFunction("proxy_stop", Level.COMPLETION, 2, ("_Z28ncclProfilerStopProxyOpEventiP13ncclProxyArgs",)),
    InternalFunction("proxy_post", Level.COMPLETION, 1, ("_Z14ncclProxyStartP8ncclComm",)),
    InternalFunction("plan_replay", Level.COMPLETION, 1, ("_ZL22hostStreamPlanCallbackPv",)),
    InternalFunction(
        "socket_send",
        Level.RAILS,
        3,
        # 2.26 and newer; 2.24 and 2.25; 2.23 and older
        (
            "_Z18ncclNetSocketIsendPvS_miS_S_PS_",
            "_Z18ncclNetSocketIsendPvS_miS_PS_",
            "_Z18ncclNetSocketIsendPvS_iiS_PS_",
        ),
    ),
    InternalFunction(
        "ib_send",
        Level.RAILS,
        2,
        ("_Z15ncclIbMultiSendP14ncclIbSendCommi", "_Z15ncclIbMultiSendP14ncclIbSendCommiPv"),
    ),
    InternalFunction("plan_launch", Level.ALL, 2, ("_Z16ncclLaunchKernelP8ncclCommP14ncclKernelPlan",)),
)
_NEEDED: Final = {Level.COMPLETION: ("proxy_post", "proxy_stop")}
"""Programs without which a level tells nothing: posting alone would never complete."""

SYMBOLS: Final = frozenset(symbol for function in FUNCTIONS for symbol in function.symbols)


@dataclass(frozen=True, slots=True)
class InternalPoints:
    """Where the programs attach in one library, by program; empty where the library has no such function."""

    points: Mapping[str, ProbePoint]

    def at(self, level: Level) -> Mapping[str, ProbePoint]:
        """The points that a level adds to the one before it."""
        programs = [function.program for function in FUNCTIONS if function.level is level]
        if any(program not in self.points for program in _NEEDED.get(level, ())):
            return {}
        return {program: self.points[program] for program in programs if program in self.points}


def internal_points(elf: Elf, library: int) -> InternalPoints:
    """Which of NCCL's internal functions are probed in one library, which BPF programs know as number `library`.

    Raises:
        ElfError: the file is damaged.
    """
    symbols = elf.symbols(SYMBOLS)
    points = {}
    for function in FUNCTIONS:
        symbol = next((name for name in function.symbols if name in symbols), None)
        if symbol is None:
            continue
        found = symbols[symbol]
        length = min(PROLOGUE_BYTES, found.size or PROLOGUE_BYTES)
        where = probe_offset(elf.read_at(found.file_offset, length), elf.machine, function.arguments)
        if where is None:
            continue
        cookie = library << 32 | (_SIZE_IS_INT if symbol in _INT_SENDS else 0)
        points[function.program] = ProbePoint(symbol, found.file_offset + where.skip_bytes, cookie)
    return InternalPoints(points)
