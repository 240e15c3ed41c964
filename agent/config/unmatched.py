"""Finds processes and devices that the configuration names and this host lacks.

A mistyped pid or pattern looks like a host on which nothing happens; so it is said, in the log and by the doctor.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from railscope.agent.config.keys import ConfigError
from railscope.agent.config.rail_patterns import RailPattern
from railscope.probes.processes.processes import ProcessIdentity, identity_of, is_alive


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
    """Check that the named processes run.  One that maps NCCL only later is right, one that has ended is not.

    Raises:
        ConfigError: no process has this pid.
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


def _absent(procfs: Path, pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if not _runs(identity_of(procfs, pid), procfs)]


def _runs(identity: ProcessIdentity | None, procfs: Path) -> bool:
    return identity is not None and is_alive(procfs, identity)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
