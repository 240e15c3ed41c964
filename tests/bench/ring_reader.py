"""What reading one event costs, while a target produces them as fast as it can."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from probes.nccl.programs import NcclPrograms
from probes.nccl.records import Stat
from tests.bench.probe_cost import accounting
from tests.bench.results import Bound, Line, Omission, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.ring_readers import ArrayReader, BccReader, CallbackReader, Reader
from tests.bench.target import BenchError, Built, Target

PART: Final = "ring"
_CALLS: Final = 700_000
_OURS, _CALLBACK, _BCC = "array reader", "libbpf callback", "bcc callback"


def measure(built: Built, rounds: int) -> list[Line]:
    """Let the readers take turns, `rounds` times."""
    lines: list[Line] = []
    cpu_us: dict[str, list[float]] = {}
    lost: dict[str, int] = {}
    rates: list[float] = []
    with ExitStack() as stack:
        target = stack.enter_context(Target(built, "ring"))
        programs = stack.enter_context(accounting(target, None))
        map_fd = programs.call_events.fd
        readers: dict[str, Reader] = {_OURS: ArrayReader(programs.call_events), _CALLBACK: CallbackReader(map_fd)}
        try:
            readers[_BCC] = BccReader(map_fd)
        except BenchError as error:
            lines.append(Omission(PART, _BCC, str(error)))
        for reader in readers.values():
            stack.callback(reader.close)
        for turn in range(-1, rounds):
            for name, reader in readers.items():
                before = _lost(programs)
                reader.start()
                target.start(_CALLS)
                nanoseconds = target.finish()
                reading = reader.finish()
                programs.lifecycle_events.read()
                missed = _lost(programs) - before
                if reading.events + missed != _CALLS:
                    raise BenchError(f"{name}: {reading.events} events read and {missed} lost of {_CALLS} calls")
                if turn >= 0:  # the first turn warms up
                    cpu_us.setdefault(name, []).append(reading.cpu_seconds / reading.events * 1e6)
                    lost[name] = lost.get(name, 0) + missed
                    rates.append(_CALLS / nanoseconds * 1e3)
    lines.append(figure(PART, "produced meanwhile", "M events/s", rates))
    for name, values in cpu_us.items():
        target_ours = Limit(Bound.BELOW, 0.15) if name == _OURS else None
        note = f"{lost[name]} of {rounds * _CALLS} lost" if lost[name] else ""
        lines.append(figure(PART, name, "µs CPU/event", values, target=target_ours, note=note))
    lines.append(figure(PART, "events lost, array reader", "events", [lost[_OURS]], target=Limit(Bound.EXACTLY, 0)))
    # bcc is the peer; where it is missing, the bare callback stands in for it.
    peer = _BCC if _BCC in cpu_us else _CALLBACK
    for name in cpu_us:
        if name != _OURS:
            target_peer = Limit(Bound.AT_LEAST, 10) if name == peer else None
            factor = ratios(cpu_us[name], cpu_us[_OURS])
            lines.append(figure(PART, f"{name} / array reader", "×", factor, target=target_peer))
    return lines


def _lost(programs: NcclPrograms) -> int:
    return programs.stats()[Stat.RING_FULL]
