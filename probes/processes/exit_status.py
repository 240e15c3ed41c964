"""Reads how a process ended, without being its parent.

Between its end and the moment its parent takes notice the status stands in `/proc/PID/stat` (field 52,
proc_pid_stat(5)); afterwards a pidfd that was opened before tells it (PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15,
include/uapi/linux/pidfd.h).  On older kernels a parent that is quick leaves nothing to know.

Without CAP_SYS_PTRACE the file shows 0 for processes of other users; an agent without it does not observe those.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from railscope.probes.processes.processes import ProcessIdentity

_PIDFD_GET_INFO: Final = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info) with that struct's first 64 bytes."""
_INFO_EXIT: Final = 1 << 3
_INFO: Final = struct.Struct("=QQ11Ii")
"""mask, cgroup, pids and credentials, exit code."""


def read_exit_status(procfs: Path, identity: ProcessIdentity, pidfd: int) -> int | None:
    """The wait status of a process that has ended, as `os.waitstatus_to_exitcode` takes it; None: not known."""
    status = _of_pidfd(pidfd)
    if status is None:
        status = _of_zombie(procfs, identity)
    # A parent that took notice in between leaves nothing in the file, and now the descriptor tells.
    return _of_pidfd(pidfd) if status is None else status


def _of_zombie(procfs: Path, identity: ProcessIdentity) -> int | None:
    try:
        fields = Path(f"{procfs}/{identity.pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 50 or fields[0] != b"Z" or int(fields[19]) != identity.start_time_ticks:
        return None
    return int(fields[49])


def _of_pidfd(pidfd: int) -> int | None:
    asked = bytearray(_INFO.pack(_INFO_EXIT, *(0 for _ in range(13))))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, asked)
    except OSError:
        return None
    told = _INFO.unpack(asked)
    return int(told[-1]) if told[0] & _INFO_EXIT else None


def exit_code(status: int | None) -> int | None:
    """The exit status, or minus the number of the signal that ended it; None: it is not known, or makes no sense."""
    try:
        return None if status is None else os.waitstatus_to_exitcode(status)
    except ValueError:  # stopped, or nothing that wait(2) would say
        return None


def exited_badly(code: int | None) -> bool | None:
    """Whether a process was killed or failed, by its `exit_code`; a request to end (SIGTERM, SIGINT, SIGHUP) is none.

    None: it is not known.
    """
    return None if code is None else code not in (0, -15, -2, -1, 128 + 15, 128 + 2)
