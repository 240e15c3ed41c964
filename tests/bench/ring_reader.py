"""What reading one event costs, and what is lost, while a million of them come each second.

A BPF program writes the events in bursts (producer.bpf.c): with a trap for each event, two cores cannot fill a ring
that fast.  The records, the rings that railscope's reader reads, and that reader are the shipped ones; the others read
a ring buffer of the kernel that is as large as all those rings, and is all that they can read.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from railscope.probes.loading import libbpf
from railscope.probes.nccl.programs.calls import CallRings, ProgramSettings
from railscope.probes.rings.slots import SlotRings
from tests.bench.results import Bound, Line, Omission, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.ring_readers import ArrayReader, BccReader, CallbackReader, Reader, Reading
from tests.bench.target import BenchError, Built

PART: Final = "ring"
_EVENTS_PER_SECOND: Final = 1_000_000
_EVENTS: Final = 1_000_000
_OURS, _CALLBACK, _BCC, _TWICE = "array reader", "libbpf callback", "bcc callback", "array reader, 2 M events/s"


@dataclass(frozen=True, slots=True)
class Produced:
    """What the producer did in one round."""

    lost: int
    """Events that found the ring full."""
    duration_ns: int


class ProducerProcess:
    """Writes into the rings of the loaded producer, by one of its programs, beside the readers."""

    def __init__(self, program_fd: int) -> None:
        """Raises BenchError when it does not start."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.produce", str(program_fd)],
            pass_fds=[program_fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        if self._output.readline().strip() != "ready":
            self.close()
            raise BenchError("the bench's producer does not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def produce(self, events: int, per_second: int) -> Produced:
        """Write so many events at this rate, and wait for the last one.

        Raises:
            BenchError: the kernel does not run the program.
        """
        self._input.write(f"{events} {per_second}\n")
        self._input.flush()
        answer = self._output.readline().split()
        if len(answer) != 2:
            raise BenchError("the bench's producer ended")
        return Produced(int(answer[0]), int(answer[1]))

    def close(self) -> None:
        """End the process."""
        self._input.close()
        self._output.close()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Round:
    """One reader's turn."""

    produced: Produced
    reading: Reading

    @property
    def rate(self) -> float:
        """Million events written or lost, a second."""
        return _EVENTS / self.produced.duration_ns * 1e3

    @property
    def cpu_us(self) -> float:
        """CPU time for each event that was read."""
        return self.reading.cpu_seconds / self.reading.events * 1e6


@dataclass(frozen=True, slots=True)
class Producing:
    """The loaded producer: its programs, and what they write into."""

    write_slots_fd: int
    write_records_fd: int
    slots: SlotRings
    kernel_ring_fd: int


@contextmanager
def producing(built: Built, rings: CallRings) -> Iterator[Producing]:
    """Load the producer.

    Raises:
        LoadError: the kernel does not take it.
    """
    loaded = libbpf.load(
        built.producer_object,
        attach_types=dict.fromkeys(("produce_slots", "produce_records"), 0),
        map_entries={**rings.map_entries, "kernel_ring": rings.rings * rings.ring_bytes},
        constants=rings.constants,
    )
    try:
        with closing(rings.open(loaded)) as slots:
            programs = loaded.program_fds
            yield Producing(
                programs["produce_slots"], programs["produce_records"], slots, loaded.map_fds["kernel_ring"]
            )
    finally:
        loaded.close()


def measure(built: Built, rounds: int) -> list[Line]:
    """Let the readers take turns, `rounds` times.

    Raises:
        LoadError: the kernel refuses the producer.
    """
    lines: list[Line] = []
    with ExitStack() as stack:
        produced = stack.enter_context(producing(built, CallRings.for_this_host(ProgramSettings().ring_bytes)))
        ours = ArrayReader(produced.slots)
        map_fd = produced.kernel_ring_fd
        readers: dict[str, Reader] = {_OURS: ours, _TWICE: ours, _CALLBACK: CallbackReader(map_fd)}
        stack.callback(readers[_CALLBACK].close)
        try:
            readers[_BCC] = BccReader(map_fd)
            stack.callback(readers[_BCC].close)
        except BenchError as error:
            lines.append(Omission(PART, _BCC, str(error)))
        slots = stack.enter_context(ProducerProcess(produced.write_slots_fd))
        kernel = stack.enter_context(ProducerProcess(produced.write_records_fd))
        taken: dict[str, list[Round]] = {name: [] for name in readers}
        for turn in range(-1, rounds):
            for name, reader in readers.items():
                producer = slots if reader is ours else kernel
                one = _round(reader, producer, _EVENTS_PER_SECOND * (2 if name == _TWICE else 1))
                if one.reading.events + one.produced.lost != _EVENTS:
                    raise BenchError(f"{name}: {one.reading.events} read and {one.produced.lost} lost of {_EVENTS}")
                if turn >= 0:  # the first turn warms up
                    taken[name].append(one)
    return lines + _lines(taken)


def _round(reader: Reader, producer: ProducerProcess, per_second: int) -> Round:
    reader.start()
    produced = producer.produce(_EVENTS, per_second)
    return Round(produced, reader.finish())


def _lines(taken: dict[str, list[Round]]) -> list[Line]:
    lines: list[Line] = []
    for name, turns in taken.items():
        at_least = Limit(Bound.AT_LEAST, 0.99) if name == _OURS else None
        lines.append(figure(PART, f"{name}: offered", "M events/s", [turn.rate for turn in turns], target=at_least))
        lost = [turn.produced.lost / _EVENTS * 100 for turn in turns]
        none = Limit(Bound.EXACTLY, 0) if name == _OURS else None
        note = f"{sum(each == 0 for each in lost)} of {len(lost)} rounds without a loss, {max(lost):.2g} % in the worst"
        lines.append(figure(PART, f"{name}: lost", "%", lost, target=none, note=note))
        below = Limit(Bound.BELOW, 0.15) if name == _OURS else None
        lines.append(figure(PART, name, "µs CPU/event", [turn.cpu_us for turn in turns], target=below))
    # bcc is the peer; where it is missing, the bare callback stands in for it.
    peer = _BCC if _BCC in taken else _CALLBACK
    ours = [turn.cpu_us for turn in taken[_OURS]]
    for name, turns in taken.items():
        if name not in (_OURS, _TWICE):
            factor = ratios([turn.cpu_us for turn in turns], ours)
            target = Limit(Bound.AT_LEAST, 10) if name == peer else None
            lines.append(figure(PART, f"{name} / array reader", "×", factor, target=target))
    return lines
