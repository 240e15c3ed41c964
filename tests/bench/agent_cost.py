"""What the agent itself takes beside an idle job: memory, CPU, and how fast it comes and goes."""

from __future__ import annotations

import compileall
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from railscope import probes
from railscope.testbed.nccl.library import nccl_library
from tests.bench.cpu_time import cpu_seconds
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import Built
from tests.fabric.agent_process import AgentProcess

PART: Final = "agent"
_IDLE_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 1.0
_MAPPER: Final = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('mapped', flush=True); sys.stdin.read()"


def leave_bytecode() -> None:
    """Compile the agent's modules, as installing does: where Python may leave none, each start takes that long more."""
    folder = Path(probes.__path__[0]).parent
    for package in ("agent", "exporters", "probes"):
        compileall.compile_dir(folder / package, quiet=1)


@contextmanager
def idle_mapper(library: Path) -> Iterator[int]:
    """A process that has the library mapped and does nothing; yields its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MAPPER, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def measure(_built: Built, rounds: int) -> list[Line]:
    """Start the agent, let it idle for 10 s and end it, `rounds` times.

    Raises:
        LibraryMissing: the NCCL library was not fetched.
    """
    library = nccl_library()
    attached_s: list[float] = []
    detached_s: list[float] = []
    resident_mb: list[float] = []
    inspection_mb: list[float] = []
    cpu_percent: list[float] = []
    leave_bytecode()
    with idle_mapper(library):
        for _ in range(rounds):
            start = time.monotonic()
            with AgentProcess() as agent:
                agent.until(lambda: _attached(agent, library))
                attached_s.append(time.monotonic() - start)
                time.sleep(_SETTLE_SECONDS)
                pid = agent.process.pid
                all_pids = (pid, *_descendants(pid))
                before_s, before = time.monotonic(), sum(map(cpu_seconds, all_pids))
                time.sleep(_IDLE_SECONDS)
                cpu_percent.append((sum(map(cpu_seconds, all_pids)) - before) / (time.monotonic() - before_s) * 100)
                resident_mb.append(_resident_bytes(pid) / 1e6)
                inspection_mb.append(sum(map(_proportional_bytes, all_pids[1:])) / 1e6)
                start = time.monotonic()
                agent.process.send_signal(signal.SIGTERM)
                agent.process.wait(30)
                detached_s.append(time.monotonic() - start)
    return [
        figure(PART, "resident memory", "MB", resident_mb, target=Limit(Bound.AT_MOST, 60)),
        figure(PART, "memory of its inspection processes", "MB", inspection_mb),
        figure(PART, "CPU, idle, not scraped", "%", cpu_percent, target=Limit(Bound.AT_MOST, 1)),
        figure(PART, "start to attached", "s", attached_s, target=Limit(Bound.AT_MOST, 1)),
        figure(PART, "SIGTERM to exit", "s", detached_s, target=Limit(Bound.AT_MOST, 0.2)),
    ]


def _attached(agent: AgentProcess, library: Path) -> bool:
    return any(value == 1 for _, value in agent.samples("railscope_probe_attached", library=str(library)))


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [one for child in children for one in (child, *_descendants(child))]


def _proportional_bytes(pid: int) -> int:
    """Memory, of which each process that shares a page has its part: proc_pid_smaps(5)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
