"""Chooses the probe points of one NCCL library.

Where the library's symbol table names `ncclEnqueueCheck`, one probe there sees every collective and point-to-point
call; a stripped library is probed at its exported functions instead.  Lifecycle functions are probed by name in both.
Each `ncclX` and its twin `pncclX` share one address, so looking up the first covers both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions import entry_points as functions
from railscope.probes.nccl.functions.prologue import PROLOGUE_BYTES, ProbeOffset, probe_offset


@dataclass(frozen=True, slots=True)
class ProbePoints:
    """Where the programs of probes/bpf/nccl.bpf.c attach in one library."""

    calls: tuple[ProbePoint, ...]
    """Hot entry points with a return address in place: entry, session and return probes."""
    calls_entry_only: tuple[ProbePoint, ...]
    """Hot entry points probed after the stack pointer moved: no return probe."""
    inits: tuple[ProbePoint, ...]
    ends: tuple[ProbePoint, ...]
    followed: tuple[ProbePoint, ...]
    """Rare functions in which calls wait for other ranks."""
    refused: tuple[str, ...]
    """Hot functions that are not probed because the kernel would single-step every call."""
    through_enqueue_check: bool

    @property
    def every(self) -> tuple[ProbePoint, ...]:
        return (*self.calls, *self.calls_entry_only, *self.inits, *self.ends, *self.followed)

    @property
    def often(self) -> ProbePoints:
        """Those that collectives run into."""
        return replace(self, inits=(), ends=(), followed=())

    @property
    def seldom(self) -> ProbePoints:
        """All others."""
        return replace(self, calls=(), calls_entry_only=())

    def numbered(self, library: int) -> ProbePoints:
        """The probe points with another library's number in their cookies; these have 0."""

        def all_of(points: tuple[ProbePoint, ...]) -> tuple[ProbePoint, ...]:
            return tuple(replace(point, cookie=point.cookie | library << 32) for point in points)

        return replace(
            self,
            calls=all_of(self.calls),
            calls_entry_only=all_of(self.calls_entry_only),
            inits=all_of(self.inits),
            ends=all_of(self.ends),
            followed=all_of(self.followed),
        )


def probe_points(elf: Elf, library: int) -> ProbePoints:
    """Which of NCCL's exported functions are probed in one library, which BPF programs know as number `library`.

    Raises:
        ElfError: the file is damaged.
    """
    symbols = elf.symbols(functions.SYMBOLS)
    machine = elf.machine
    hot: dict[str, ProbeOffset | None] = {}
    for symbol in (functions.ENQUEUE_CHECK, *(function.symbol for function in functions.COLLECTIVE_FUNCTIONS)):
        if found := symbols.get(symbol):
            length = min(PROLOGUE_BYTES, found.size or PROLOGUE_BYTES)
            hot[symbol] = probe_offset(elf.read_at(found.file_offset, length), machine)
    through_enqueue_check = hot.get(functions.ENQUEUE_CHECK) is not None
    if through_enqueue_check:
        hot = {functions.ENQUEUE_CHECK: hot[functions.ENQUEUE_CHECK]}
    else:
        hot.pop(functions.ENQUEUE_CHECK, None)
    by_symbol = {function.symbol: function for function in functions.COLLECTIVE_FUNCTIONS}
    calls: list[ProbePoint] = []
    entry_only: list[ProbePoint] = []
    for symbol, where in hot.items():
        if where is None:
            continue
        if symbol == functions.ENQUEUE_CHECK:
            cookie = functions.enqueue_check_cookie(library)
        else:
            cookie = functions.collective_cookie(by_symbol[symbol], machine, library, where.stack_bytes)
        point = ProbePoint(symbol, symbols[symbol].file_offset + where.skip_bytes, cookie)
        (calls if where.return_possible else entry_only).append(point)
    refused = tuple(symbol for symbol, where in hot.items() if where is None)
    inits = tuple(
        ProbePoint(f.symbol, symbols[f.symbol].file_offset, functions.init_cookie(f, machine, library))
        for f in functions.INIT_FUNCTIONS
        if f.symbol in symbols
    )
    ends = tuple(
        ProbePoint(f.symbol, symbols[f.symbol].file_offset, functions.end_cookie(f, machine, library))
        for f in functions.END_FUNCTIONS
        if f.symbol in symbols
    )
    followed = [
        ProbePoint(symbol, symbols[symbol].file_offset, functions.followed_cookie(f, machine, library))
        for f in functions.FOLLOWED_FUNCTIONS
        for symbol in [one for one in f.symbols if one in symbols][:1]
    ]
    return ProbePoints(
        _distinct(calls),
        _distinct(entry_only),
        _distinct(inits),
        _distinct(ends),
        _distinct(followed),
        refused,
        through_enqueue_check,
    )


def _distinct(points: list[ProbePoint] | tuple[ProbePoint, ...]) -> tuple[ProbePoint, ...]:
    """One probe an offset: two names of one function would count a call twice."""
    by_offset = {point.file_offset: point for point in reversed(points)}
    return tuple(by_offset[offset] for offset in sorted(by_offset))
