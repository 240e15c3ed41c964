"""What the configuration names and this host does not have: processes and devices.

A mistyped pid or pattern looks like a host on which nothing happens; so it is said, in the log and by the doctor.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from railscope.agent.config_keys import ConfigError
from railscope.agent.rails import RailPattern
from railscope.probes.processes import ProcessIdentity, identity_of, is_alive

_MOST_SAID: Final = 3


def pids_without_nccl(procfs: Path, pids: Iterable[int], mappers: Collection[int]) -> str:
    """Which of the processes named by --pid are not there or have no NCCL, on one line; empty: all have it.

    `mappers` are the pids of all processes that have NCCL mapped.
    """
    without = [pid for pid in pids if pid not in mappers]
    absent = _absent(procfs, without)
    present = [pid for pid in without if pid not in absent]
    said = []
    if absent:
        said.append(f"no process has the pid {_listed(absent)}")
    if present:
        said.append(f"no NCCL is mapped by pid {_listed(present)}")
    return "; ".join(said)


def require_processes(procfs: Path, pids: Iterable[int]) -> None:
    """Whoever names processes means some that run; one that maps NCCL only later is right, one that ended is not.

    Raises:
        ConfigError: a pid is nobody's.
    """
    if absent := _absent(procfs, pids):
        raise ConfigError(
            f"--pid: no process has the pid {_listed(absent)}: name processes that run, or leave --pid out to observe "
            "all that use NCCL"
        )


def patterns_without_device(patterns: Sequence[RailPattern], devices: Iterable[str]) -> str:
    """Which patterns of --rail.devices match none of these names, on one line; empty: all match."""
    names = set(devices)
    without = [pattern.glob for pattern in patterns if not fnmatch.filter(names, pattern.glob)]
    return f"no device is called {_listed(without)}" if without else ""


class Troubles:
    """What looks at the host could not do: said once, for the same trouble at every look is no news."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: frozenset[str] = frozenset()

    def say(self, errors: Collection[str], *, more: bool = False) -> None:
        """All that went wrong by now, one line each; `more`: besides what was said before."""
        news = [error for error in errors if error not in self._known]
        self._known = frozenset(errors) | (self._known if more else frozenset())
        for error in news[:_MOST_SAID]:
            self._log.warning("%s", error)
        if len(news) > _MOST_SAID:
            self._log.warning(
                "and %d more of the kind; 'railscope doctor' says what is missing", len(news) - _MOST_SAID
            )


class Remark:
    """A line that is logged when it changes."""

    def __init__(self, log: logging.Logger, flag: str, mended: str) -> None:
        """`mended` is said when there is nothing to remark any more."""
        self._log = log
        self._flag = flag
        self._mended = mended
        self._said = ""

    def say(self, line: str) -> None:
        if line == self._said:
            return
        self._said = line
        if line:
            self._log.warning("%s: %s", self._flag, line)
        else:
            self._log.info("%s: %s", self._flag, self._mended)


def _absent(procfs: Path, pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if not _runs(identity_of(procfs, pid), procfs)]


def _runs(identity: ProcessIdentity | None, procfs: Path) -> bool:
    return identity is not None and is_alive(procfs, identity)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
