"""Reads the owner, program and resource use of a process.

A process chooses its own command line (/proc/PID/cmdline): as long as it likes, in any bytes, with escape sequences
for whoever's terminal shows it, and with passwords among its arguments.  So this much of it is told by default: the
program's name, and for an interpreter the name of the script or module that it runs.  Whoever asks for all of the
command line gets it bounded and in characters that can be printed.

psutil reads the rest; importing it takes 20 ms, which importers of the types alone need not wait for.  It does
not read the command line here, because it reads all of it, which may be 2 MB.  It reads /proc and no other folder, so
of another host's procfs only the program is known.

Reading a command line takes the lock on the process's memory, which a process that hangs in a page fault on a dead file
server may hold for ever: the daemon has it read by an inspection process (agent/node/targets/processes.py).  What
`usage_of` reads takes no such lock.
"""

from __future__ import annotations

import pwd
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.clock import Clock
from railscope.probes.printable import printable
from railscope.probes.processes import processes
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of

MOST_COMMAND_LINE_BYTES: Final = 4096
"""Read of a command line; what follows is not looked at."""
MOST_NAME: Final = 64
"""Characters of a user's, a program's or a script's name."""

_ESCAPE_SEQUENCE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # ECMA-48: control sequences
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x9c|\x1b\\)?"  # strings up to their end
    r"|\x1b[ -/]*[0-~]?"  # all others
)
_INTERPRETERS: Final = re.compile(r"(?:python|pypy|bash|sh|dash|zsh|perl|ruby|node|julia|Rscript)[\d.]*")
_PYTHON: Final = re.compile(r"(?:python|pypy)[\d.]*")
_MODULE: Final = re.compile(r"\w+(?:\.\w+)*")


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The owner of a process and the program that it runs; empty: not known."""

    identity: ProcessIdentity
    user: str
    """The name of its real user on this host, or the user's number where the host has no name for it."""
    program: str
    """As `python3 train.py`: without arguments."""
    uid: int | None = None
    """None: not known."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process took of its host up to one moment."""

    read_realtime_ns: int
    cpu_seconds: float
    """User and system time, of all threads, since it began."""
    resident_bytes: int
    threads: int
    start_realtime_ns: int


def owner_of(procfs: Path, identity: ProcessIdentity) -> ProcessOwner | None:
    """The user and program of that very process; None if it has gone, or may not be read."""
    user, program = _user(identity.pid) if procfs == PROCFS else "", program_of(procfs, identity.pid)
    # The pid may have passed to another process meanwhile; as it has not, all that was read is of this one.
    if not (user or program) or identity_of(procfs, identity.pid) != identity:
        return None
    return ProcessOwner(identity, user, program)


def program_of(procfs: Path, pid: int) -> str:
    """The program that a process runs; empty where that cannot be read."""
    return program_name(command_line(procfs, pid)) or _clean(processes.command_name(procfs, pid))


def user_name(uid: int) -> str:
    """The name of a user of this host, or the number where there is none; may wait for a directory server."""
    try:
        return printable(pwd.getpwuid(uid).pw_name[:MOST_NAME], instead="")
    except (KeyError, OSError, OverflowError):
        return str(uid)


def usage_of(procfs: Path, identity: ProcessIdentity, clock: Clock) -> ProcessUsage | None:
    """CPU time and memory that that very process took; None where it has gone, or may not be read."""
    if procfs != PROCFS:
        return None
    import psutil

    try:
        process = psutil.Process(identity.pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
            usage = ProcessUsage(
                read_realtime_ns=clock.realtime_ns(),
                cpu_seconds=times.user + times.system,
                resident_bytes=memory.rss,
                threads=process.num_threads(),
                start_realtime_ns=int(process.create_time() * 1e9),
            )
    except (psutil.Error, OSError):
        return None
    return usage if identity_of(procfs, identity.pid) == identity else None


def command_line(procfs: Path, pid: int) -> tuple[str, ...]:
    """A process's program and its arguments, in characters that can be printed.

    Cut at `MOST_COMMAND_LINE_BYTES`, and then without the word that this cuts.  Empty where the process has gone, has
    none, or may not be read.
    """
    text = processes.command_line(procfs, pid, MOST_COMMAND_LINE_BYTES)
    words = text.split(b"\0")
    if len(text) == MOST_COMMAND_LINE_BYTES or not words[-1]:
        words.pop()
    return tuple(_clean(word) for word in words)


def program_name(words: tuple[str, ...]) -> str:
    """The program in a command line, and the script or module where it is an interpreter; never an argument."""
    if not words:
        return ""
    # A process that writes a title for ps(1) puts all of it into the first word: what follows its name is free text.
    first = words[0] if words[0].startswith("/") else words[0].partition(" ")[0]
    program = first.rstrip("/").rpartition("/")[2][:MOST_NAME]
    if not _INTERPRETERS.fullmatch(program):
        return program
    script = _script(words[1:], python=_PYTHON.fullmatch(program) is not None)
    return f"{program} {script}" if script else program


def _script(arguments: tuple[str, ...], *, python: bool) -> str:
    """What an interpreter runs; empty where that cannot be told from its arguments."""
    if not python:
        first = arguments[0] if arguments else ""
        return "" if first.startswith("-") else _file_name(first)
    # python(1): options may stand together (-um), and -W and -X have a value.
    values = iter(arguments)
    for word in values:
        if word == "--check-hash-based-pycs":
            next(values, None)
        elif not word.startswith("-"):
            return _file_name(word)
        elif not word.startswith("--"):
            for place, letter in enumerate(word[1:], start=2):
                value = word[place:]
                if letter == "c":
                    return "-c"
                if letter == "m":
                    module = value or next(values, "")
                    return f"-m {module}"[:MOST_NAME] if _MODULE.fullmatch(module) else "-m"
                if letter in "WX":
                    if not value:
                        next(values, None)
                    break
    return ""


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2][:MOST_NAME]


def _user(pid: int) -> str:
    import psutil

    try:
        return user_name(psutil.Process(pid).uids().real)
    except (psutil.Error, OSError):
        return ""


def _clean(word: bytes) -> str:
    """Without escape sequences, and without any other character that cannot be printed."""
    return printable(_ESCAPE_SEQUENCE.sub("", word.decode("utf-8", "replace")), instead="")
