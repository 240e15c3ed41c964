"""What a transfer of a library other than NCCL costs its program and the agent.

Each kind of transfer is made of functions with the library's names and almost nothing in them (transfers.c), so that
its time is the probes' time; the same transfers with programs that do nothing, at the same places, are the floor.
Then one process makes 10,000 a second, and an agent follows them.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import BPF_TRACE_UPROBE_MULTI, BPF_TRACE_UPROBE_SESSION
from railscope.probes.loading.links import AttachKind, Links
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.transfers.functions import TransferPoints, transfer_points
from railscope.probes.transfers.programs import TransferPrograms
from tests.bench.agent_cost import idle_mapper, leave_bytecode
from tests.bench.cpu_time import cpu_seconds
from tests.bench.results import Bound, Line, Omission, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.run_times import run_times
from tests.bench.target import BenchError, Built, compile_with
from tests.fabric.agent_process import AgentProcess

PART: Final = "transfers"
KINDS: Final = {
    "ucx": "a put that is complete at once",
    "ucx-request": "a put with a request, and its release",
    "nixl": "a write of 8 blocks, and its status",
    "mpi": "a blocking send",
    "mpi-request": "a send that does not block, and the wait for it",
    "nvshmem": "a put on a stream",
}
_TRANSFERS: Final = 5_000
_UNPROBED, _EMPTY, _FULL = "unprobed", "empty programs", "railscope"
_MOST_RATIO: Final = 1.5
_A_SECOND: Final = 10_000
_SECONDS: Final = 10
_FOLLOWS: Final = ("--budget", "100%")
"""Whatever the probes cost: by the usual budget they come off at some rate."""
_PROGRAM: Final = "empty"
_MARK: Final = "transfer_"
"""How the names of the programs begin."""


class Loop:
    """A running process that makes one kind of transfer by its own copy of the library."""

    def __init__(self, library: Path, program: Path, kind: str, name: str) -> None:
        """Raises BenchError when the process does not start."""
        self.library = library.with_name(f"libtransfers-{name}.so")
        shutil.copyfile(library, self.library)
        self._process = subprocess.Popen(
            [str(program), str(self.library), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._line() != "ready":
            self.close()
            raise BenchError("the process that makes transfers does not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    def points(self) -> TransferPoints:
        """Where to probe the copy.

        Raises:
            BenchError: it cannot be probed as a real library is.
        """
        with self.library.open("rb") as file, Elf.open(file.fileno()) as elf:
            points = transfer_points(elf)
        if points is None or points.refused:
            raise BenchError(f"the compiler did not begin the functions as the bench needs them: {points}")
        return points

    def start(self, transfers: int, a_second: int = 0) -> None:
        """Let it make so many; `a_second` 0: as fast as it can."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{transfers} {a_second}\n")
        self._process.stdin.flush()

    def finish(self) -> int:
        """Wait for them; returns the CPU time they took, ns."""
        return int(self._line())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True, slots=True)
class _Variants:
    """Of one kind, by the way that it is probed."""

    loops: dict[str, Loop]
    samples: dict[str, list[float]]


def measure(built: Built, rounds: int) -> list[Line]:
    """Alternate between all kinds and variants, then follow 10,000 transfers a second.

    Raises:
        BenchError: something does not compile or start.
        LibraryMissing: the NCCL library was not fetched.
    """
    library, program = built.loop.with_name("libtransfers.so"), built.loop.with_name("transfers-loop")
    source = str(Path(__file__).with_name("transfers.c"))
    compile_with(source, "-shared", "-DLIBRARY", "-o", str(library))
    compile_with(source, "-ldl", "-o", str(program))
    return [*_probes(built, library, program, rounds), *_agent(library, program), *_without()]


def _probes(built: Built, library: Path, program: Path, rounds: int) -> list[Line]:
    with ExitStack() as stack:
        nccl = NcclPrograms.load(ProgramSettings(attach=AttachKind.MULTI))
        stack.callback(nccl.close)
        if nccl.enqueue_time is not EnqueueTime.SESSION:
            return [Omission(PART, "cost of a transfer", "this kernel has no sessions: Linux 6.13 and newer")]
        programs = TransferPrograms.load(nccl)
        stack.callback(programs.close)
        kinds = {}
        for kind in KINDS:
            loops = {
                name: stack.enter_context(Loop(library, program, kind, f"{kind}-{number}"))
                for number, name in enumerate((_UNPROBED, _EMPTY, _FULL))
            }
            stack.enter_context(_empty_programs(built, loops[_EMPTY]))
            stack.callback(programs.attach(str(loops[_FULL].library), loops[_FULL].points()).close)
            kinds[kind] = _Variants(loops, {name: [] for name in loops})
        for turn in range(-1, rounds):
            for one in kinds.values():
                # Every second round runs backwards, so that each follows and precedes every neighbour as often.
                for name, loop in list(one.loops.items())[:: 1 if turn % 2 else -1]:
                    loop.start(_TRANSFERS)
                    nanoseconds = loop.finish() / _TRANSFERS
                    if turn >= 0:  # the first turn warms up
                        one.samples[name].append(nanoseconds)
    lines: list[Line] = []
    for kind, one in kinds.items():
        lines += [figure(PART, f"{kind}, {name}", "ns/transfer", one.samples[name]) for name in one.loops]
        over_empty = ratios(one.samples[_FULL], one.samples[_EMPTY])
        limit = Limit(Bound.AT_MOST, _MOST_RATIO)
        lines.append(figure(PART, f"{kind} / empty programs", "×", over_empty, target=limit, note=KINDS[kind]))
    return lines


@contextmanager
def _empty_programs(built: Built, loop: Loop) -> Iterator[None]:
    """Attach the program that does nothing where railscope's would be: entry and return, or entry alone."""
    points = loop.points()
    with ExitStack() as stack:
        for kind, some, session in (
            (BPF_TRACE_UPROBE_SESSION, (*points.calls, *points.waits, *points.entries), True),
            (BPF_TRACE_UPROBE_MULTI, points.ends, False),
        ):
            loaded = libbpf.load(built.empty_object, attach_types={_PROGRAM: kind}, map_entries={})
            stack.callback(loaded.close)
            links = Links()
            stack.callback(links.close)
            links.attach(AttachKind.MULTI, loaded.program_fds[_PROGRAM], str(loop.library), some, session=session)
        yield


def _agent(library: Path, program: Path) -> list[Line]:
    """An agent beside 10,000 transfers a second, which is scraped once a second."""
    leave_bytecode()
    with (
        Loop(library, program, "ucx-request", "agent") as loop,
        AgentProcess(*_FOLLOWS, "--pid", str(loop.pid)) as agent,
    ):
        agent.until(lambda: any(on for _, on in agent.samples("railscope_transfer_probe_attached")))
        loop.start(_A_SECOND * 2, _A_SECOND)
        loop.finish()
        before = cpu_seconds(agent.process.pid)
        began = time.monotonic()
        loop.start(_A_SECOND * _SECONDS, _A_SECOND)
        while (left := began + _SECONDS - time.monotonic()) > 0:
            agent.samples("railscope_transfer_operations_total")
            time.sleep(min(1.0, left))
        taken, lasted = cpu_seconds(agent.process.pid) - before, time.monotonic() - began
        loop.finish()
        made = sum(value for _, value in agent.samples("railscope_transfer_operations_total", op="Put"))
    return [
        figure(
            PART, f"agent beside {_A_SECOND:,} a second", "% of a core", [100 * taken / lasted],
            target=Limit(Bound.AT_MOST, 5), note="scraped once a second",
        ),
        figure(
            PART, "transfers that it did not count", "transfers", [_A_SECOND * (2 + _SECONDS) - made],
            target=Limit(Bound.EXACTLY, 0),
        ),
    ]  # fmt: skip


def _without() -> list[Line]:
    """An agent beside a process that maps no such library."""
    with idle_mapper(Path("/lib/x86_64-linux-gnu/libm.so.6")) as pid, AgentProcess("--pid", str(pid)) as agent:
        agent.samples("railscope_build_info")
        loaded = [name for name in run_times(agent.process.pid) if name.startswith(_MARK)]
    return [
        figure(
            PART, "programs loaded where no process maps such a library", "programs", [len(loaded)],
            target=Limit(Bound.EXACTLY, 0),
        )
    ]  # fmt: skip
