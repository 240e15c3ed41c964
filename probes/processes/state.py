"""Reads the state of a process: stopped, waiting for a processor, or busy.

Sources: proc_pid_stat(5), `/proc/PID/task/TID/schedstat` (Linux Documentation/scheduler/sched-stats.rst: time on a
processor, time waiting for one, number of times it ran), `/proc/PID/task/TID/syscall` (proc_pid_syscall(5)).  A frozen
process looks like one that sleeps (version 2 of control groups: state S, version 1: D): only its group tells, in
`cgroup.events` or `freezer.state` (Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/freezer-subsystem.rst).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from railscope.probes.clock import Clock
from railscope.probes.processes.memory import read_memory
from railscope.probes.processes.processes import ProcessIdentity

Condition = Literal["running", "stopped", "traced", "frozen", "gone"]

MOST_THREADS: Final = 512
"""Looked at in one process: a PyTorch rank has some hundred."""
_SCHEDSTAT_BYTES: Final = 128
CGROUPS: Final = Path("/sys/fs/cgroup")
_STOPPED: Final = "T"
_TRACED: Final = "t"
_SLEEPING: Final = frozenset("SD")
_DEAD: Final = frozenset("ZX")
_SYSCALLS_THAT_WAIT: Final = {
    "x86_64": {"read": 0, "poll": 7, "readv": 19, "recvfrom": 45, "recvmsg": 47, "ppoll": 271},
    "aarch64": {"read": 63, "readv": 65, "ppoll": 73, "recvfrom": 207, "recvmsg": 212},
}
_POLLS: Final = frozenset({"poll", "ppoll"})
_POLLED: Final = struct.Struct("=ihh")
_MOST_POLLED: Final = 64
"""A thread that takes part in collectives waits for few; one with more is cut, and still all must be sockets."""


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """One thread's share of the processors since it began."""

    tid: int
    busy_ns: int
    waited_ns: int
    """Ready to run, but no processor was free for it, or its cgroup's quota was used up."""
    runs: int
    """How often it was given a processor."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process at one moment."""

    time_ns: int
    condition: Condition
    threads: tuple[ThreadTimes, ...]
    written_bytes: int | None
    """Given to the storage layer so far; None: not allowed to know."""

    @property
    def busy_ns(self) -> int:
        return sum(thread.busy_ns for thread in self.threads)

    @property
    def waited_ns(self) -> int:
        return sum(thread.waited_ns for thread in self.threads)


def process_state(procfs: Path, identity: ProcessIdentity, clock: Clock, cgroups: Path = CGROUPS) -> ProcessState:
    """What one process does (runs, sleeps, is stopped …); `gone` where it has ended."""
    folder = f"{procfs}/{identity.pid}"
    now_ns = clock.monotonic_ns()
    state = _main_state(folder, identity)
    if state is None:
        return ProcessState(now_ns, "gone", (), None)
    condition: Condition = "running"
    if state == _STOPPED:
        condition = "stopped"
    elif state == _TRACED:
        condition = "traced"
    elif state in _SLEEPING and _frozen(folder, cgroups):
        condition = "frozen"
    return ProcessState(now_ns, condition, thread_times(procfs, identity.pid), written_bytes(procfs, identity.pid))


def threads_waiting_for_network(procfs: Path, pid: int, tids: frozenset[int], machine: str) -> dict[int, str]:
    """Those of a process's threads that wait, without a time limit, for a socket: the system call by thread.

    A thread that polls many descriptors waits for the network if all of them are sockets.  Empty where the kernel does
    not tell (CAP_SYS_PTRACE is missing, or it was built without CONFIG_HAVE_ARCH_TRACEHOOK).
    """
    names = {number: name for name, number in _SYSCALLS_THAT_WAIT.get(machine, {}).items()}
    found = {}
    for tid in tids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"{procfs}/{pid}/task/{tid}/syscall").read_text()
            fields = text.split()
            name = names.get(int(fields[0])) if fields[0].lstrip("-").isdigit() else None
            if name is None:
                continue
            first, second, third = (int(field, 16) for field in fields[1:4])
            if name in _POLLS:
                # poll: a time limit below zero means none; ppoll: a null pointer does.
                unlimited = third & 0xFFFFFFFF >= 1 << 31 if name == "poll" else third == 0
                sockets = unlimited and _all_sockets(procfs, pid, _polled(procfs, pid, first, second))
            else:
                sockets = _all_sockets(procfs, pid, [first])
            if sockets:
                found[tid] = name
    return found


def _main_state(folder: str, identity: ProcessIdentity) -> str | None:
    """The state letter of the thread group's leader; None: that process has ended.

    A leader may end before the other threads: the process then goes on, and its letter says nothing about them.
    """
    try:
        text = Path(f"{folder}/stat").read_bytes()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return None
        raise
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 20 or int(fields[19]) != identity.start_time_ticks:
        return None
    letter = fields[0].decode()
    if letter in _DEAD:
        return "S" if int(fields[17]) > 1 else None
    return letter


def thread_times(procfs: Path, pid: int) -> tuple[ThreadTimes, ...]:
    """What each thread of a process has run so far, of at most `MOST_THREADS`.

    Empty: the process has ended, or one is not allowed to know.
    """
    found = []
    # By descriptor, which takes a third of the time: this is asked of every process every second.
    with contextlib.suppress(OSError), os.scandir(f"{procfs}/{pid}/task") as tasks:
        for task in islice(tasks, MOST_THREADS):
            with contextlib.suppress(OSError, ValueError):
                file = os.open(f"{task.path}/schedstat", os.O_RDONLY)
                try:
                    busy, waited, runs = map(int, os.read(file, _SCHEDSTAT_BYTES).split())
                finally:
                    os.close(file)
                found.append(ThreadTimes(int(task.name), busy, waited, runs))
    return tuple(found)


def written_bytes(procfs: Path, pid: int) -> int | None:
    """What a process gave to the storage layer so far; None: it has ended, or one is not allowed to know."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"{procfs}/{pid}/io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "write_bytes":
                return int(value)
    return None


def _frozen(folder: str, cgroups: Path) -> bool:
    """Whether the process's control group is frozen, of version 2, beside version 1, or of version 1."""
    files = []
    with contextlib.suppress(OSError):
        for line in Path(f"{folder}/cgroup").read_text(errors="surrogateescape").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0":
                files += [f"{cgroups}{path}/cgroup.events", f"{cgroups}/unified{path}/cgroup.events"]
            elif "freezer" in controllers.split(","):
                files.append(f"{cgroups}/freezer{path}/freezer.state")
    return any(_says_frozen(file) for file in files)


def _says_frozen(file: str) -> bool:
    with contextlib.suppress(OSError):
        words = Path(file).read_text().splitlines()
        return "frozen 1" in words or "FROZEN" in words
    return False


def _polled(procfs: Path, pid: int, address: int, count: int) -> list[int]:
    """The descriptors of a `struct pollfd` array in the process's memory."""
    memory = os.open(f"{procfs}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = read_memory(memory, min(count, _MOST_POLLED) * _POLLED.size, address)
    finally:
        os.close(memory)
    return [fd for fd, _events, _returned in _POLLED.iter_unpack(data or b"") if fd >= 0]


def _all_sockets(procfs: Path, pid: int, descriptors: list[int]) -> bool:
    return bool(descriptors) and all(
        str(Path(f"{procfs}/{pid}/fd/{number}").readlink()).startswith("socket:") for number in descriptors
    )
