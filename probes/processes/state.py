"""Reads the state of a process: stopped, waiting for a processor, or busy.

Sources: proc_pid_stat(5), `/proc/PID/task/TID/schedstat` (Linux Documentation/scheduler/sched-stats.rst: time on a
processor, time waiting for one, number of times it ran), `/proc/PID/task/TID/syscall` (proc_pid_syscall(5)).  A frozen
process looks like one that sleeps (version 2 of control groups: state S, version 1: D): its group tells, in
`cgroup.events` or `freezer.state` (Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/freezer-subsystem.rst).
Where that group cannot be seen, as from a container without the host's /sys/fs/cgroup, `/proc/PID/wchan` does: by
version 2 a process waits where signals are delivered (kernel/signal.c, do_freezer_trap), by version 1 in the
refrigerator or, from Linux 6.1 on, in state D in a wait that any signal would interrupt (kernel/freezer.c).
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
_PF_EXITING: Final = 0x4
"""Of the process's flags (Linux include/linux/sched.h)."""
_SIGKILL_PENDING: Final = 1 << (9 - 1)
_STOPPED: Final = "T"
_TRACED: Final = "t"
_SLEEPING: Final = frozenset("SD")
_DEAD: Final = frozenset("ZX")
_FREEZES: Final = frozenset({"do_freezer_trap", "get_signal", "__refrigerator"})
"""Functions of the kernel in which nothing but a frozen process sleeps; the first may be part of the second."""
_INTERRUPTIBLE: Final = frozenset(
    {
        *("hrtimer_nanosleep", "do_nanosleep", "futex_do_wait", "futex_wait_queue", "do_sys_poll", "do_poll"),
        *("poll_schedule_timeout", "do_epoll_wait", "ep_poll", "do_select", "sk_wait_data", "inet_csk_accept"),
        *("pipe_read", "unix_stream_read_generic", "unix_stream_data_wait", "do_wait", "do_sigtimedwait"),
    }
)
"""In which a process that is not frozen sleeps in state S."""
_DEEPEST_GROUP: Final = 64
_FROZEN: Final = "frozen 1"
"""A line of `cgroup.events`."""
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
    freezer: str = ""
    """The file that thaws it where it is frozen; empty: it cannot be seen."""

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
        return ProcessState(now_ns, "gone", ())
    condition: Condition = "running"
    if state == _STOPPED:
        condition = "stopped"
    elif state == _TRACED:
        condition = "traced"
    freezer = _freezer(folder, cgroups, state) if state in _SLEEPING else None
    if freezer is not None:
        condition = "frozen"
    return ProcessState(now_ns, condition, thread_times(procfs, identity.pid), freezer or "")


def is_ending(procfs: Path, identity: ProcessIdentity) -> bool:
    """Whether a process has ended or is about to: it exits (PF_EXITING), or was sent SIGKILL."""
    folder = f"{procfs}/{identity.pid}"
    try:
        fields = Path(f"{folder}/stat").read_bytes().rpartition(b")")[2].split()
        if len(fields) < 20 or int(fields[19]) != identity.start_time_ticks:
            return True
        if fields[0].decode() in _DEAD or int(fields[6]) & _PF_EXITING:
            return True
        lines = Path(f"{folder}/status").read_text(errors="replace").splitlines()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ESRCH)
    except ValueError:
        return False
    pending = [line.partition(":")[2] for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) & _SIGKILL_PENDING for mask in pending)


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


def _freezer(folder: str, cgroups: Path, state: str) -> str | None:
    """The file that thaws a process whose control group is frozen; empty: it cannot be seen.  None: it is not frozen.

    The group is of version 2, of version 2 beside version 1, or of version 1.
    """
    seen = False
    with contextlib.suppress(OSError):
        for line in Path(f"{folder}/cgroup").read_text(errors="surrogateescape").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0":
                places = [(root, "cgroup.events", "cgroup.freeze", "1") for root in (cgroups, cgroups / "unified")]
            elif "freezer" in controllers.split(","):
                places = [(cgroups / "freezer", "freezer.state", "freezer.self_freezing", "1")]
            else:
                continue
            for root, tells, asked, yes in places:
                words = _words_of(f"{root}{path}/{tells}")
                seen = seen or bool(words)
                if _FROZEN in words or "FROZEN" in words:
                    group = _frozen_itself(root, path, asked, yes)
                    return f"{group}/{'cgroup.freeze' if number == '0' else 'freezer.state'}"
    return "" if not seen and _waits_in_freezer(folder, state) else None


def group_events(procfs: Path, pid: int, cgroups: Path = CGROUPS) -> Path | None:
    """The file in which the kernel announces that the control group of a process is frozen; None: there is none.

    It is of version 2, also where that stands beside version 1; it announces what happens to groups around it, too.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"{procfs}/{pid}/cgroup").read_text(errors="surrogateescape").splitlines():
            number, _, rest = line.partition(":")
            if number != "0":
                continue
            path = rest.partition(":")[2]
            for root in (cgroups, cgroups / "unified"):
                file = Path(f"{root}{path}/cgroup.events")
                if file.exists():
                    return file
    return None


def is_frozen(events: Path) -> bool:
    """Whether a control group is frozen, by its `cgroup.events`; not where it is gone."""
    return _FROZEN in _words_of(str(events))


def _frozen_itself(root: Path, path: str, file: str, yes: str) -> str:
    """The folder of the group that was frozen, which may be a parent of the one that a process is in."""
    group = path.rstrip("/")
    for _ in range(_DEEPEST_GROUP):
        if yes in _words_of(f"{root}{group}/{file}") or not group:
            break
        group = group.rpartition("/")[0]
    return f"{root}{group}"


def _words_of(file: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(file).read_text().splitlines()
    return []


def _waits_in_freezer(folder: str, state: str) -> bool:
    with contextlib.suppress(OSError):
        function = Path(f"{folder}/wchan").read_text(errors="replace").partition(".")[0]
        return function in _FREEZES or (state == "D" and function in _INTERRUPTIBLE)
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
