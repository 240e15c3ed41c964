"""The inspection processes: one that makes them, and one for each tenant that is being looked at.

    python -m railscope.agent.node.inspection.worker FD

The first reads nothing that a tenant controls: it waits on the socket FD for a channel, and forks a process that
answers questions on that channel until it closes.  A fork takes milliseconds, where a new interpreter would take a
tenth of a second, and shares its memory.  Each such process gives up every right but those that reading another
user's process takes, and has limits of memory and of what it may write; how long it may take is for the daemon to
judge, which kills it.  All of them end with the daemon.

What a tenant could gain by taking over such a process: to read what the agent may read of processes, which is those of
other users too.  It may load no program into the kernel, change no network and write no file.

Sources: capabilities(7), prctl(2) (PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS), setrlimit(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Collection, Sequence
from typing import Final

from railscope.agent.node.inspection.answers import encode
from railscope.agent.node.inspection.questions import Found, Memory, Question, Refused
from railscope.agent.node.inspection.wire import Incoming, WireError, send

READY: Final = b"R"
MAKE: Final = b"M"
FOUND: Final = "found"
REFUSED: Final = "refused"

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAP_DAC_READ_SEARCH, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_CHECKPOINT_RESTORE = 2, 19, 21, 40
_CAPABILITY_VERSION: Final = 0x20080522
_MORE_MEMORY_BYTES: Final = 192 << 20
"""Over what it begins with: a library's whole symbol table and debug information of a megabyte fit in it many times."""
_NICENESS: Final = 5
"""The daemon and the jobs come first."""

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: Sequence[str]) -> int:
    """Make an inspection process for each channel that comes, until the daemon is gone."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _make_processes(arguments)
    return 0


def _make_processes(arguments: Sequence[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    _end_with_parent()
    # A terminal sends these to all of its processes: the daemon, which heeds them, decides when this one ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Nobody waits for the processes: the daemon holds a descriptor of each.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module in arguments[1:]:
        __import__(module)
    control.sendall(READY)
    while True:
        said, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if said != MAKE or len(descriptors) != 1:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve(descriptors[0])
            os._exit(0)
        os.close(descriptors[0])
        process = os.pidfd_open(pid)
        socket.send_fds(control, [struct.pack("<i", pid)], [process])
        os.close(process)


def _serve(channel_descriptor: int) -> None:
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _limit()
    channel = socket.socket(fileno=channel_descriptor)
    channel.setblocking(True)
    incoming, memory = Incoming(channel), Memory()
    while True:
        try:
            message = incoming.read()
        except WireError:
            return  # the daemon has no more questions
        if message is not None:
            _answer(channel, *message, memory)


def _answer(channel: socket.socket, asked: bytes, given: Collection[int], memory: Memory) -> None:
    descriptors: list[int] = []
    try:
        question: Question[object] = pickle.loads(asked)
        try:
            found: Found[object] = question.find(memory, given)
            descriptors = found.descriptors
            reply: tuple[object, ...] = (FOUND, found.answer)
        except Refused as refused:
            reply = (REFUSED, str(refused), refused.gone)
        send(channel, encode(reply, question.builds), descriptors)
    finally:
        for descriptor in (*given, *descriptors):
            os.close(descriptor)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit() -> None:
    """Give up what reading does not take.  Where the kernel refuses one of these, the others hold."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kept = sum(1 << one for one in (_CAP_DAC_READ_SEARCH, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_CHECKPOINT_RESTORE))
    header = struct.pack("<Ii", _CAPABILITY_VERSION, 0)
    now = ctypes.create_string_buffer(24)
    if _libc.capget(header, now) == 0:
        # Three words of 32 bits twice: effective, permitted, inheritable; the higher halves last.
        words = list(struct.unpack("<6I", now.raw))
        low, high = kept & 0xFFFFFFFF, kept >> 32
        for at, mask in ((0, low), (1, low), (2, 0), (3, high), (4, high), (5, 0)):
            words[at] &= mask
        _libc.capset(header, struct.pack("<6I", *words))
    with open("/proc/self/statm", "rb") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    most = size_bytes + _MORE_MEMORY_BYTES
    for limit, value in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 512),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    os.nice(_NICENESS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
