"""A process that runs ranks: whose it is, which program it runs, what it takes of its host."""

from __future__ import annotations

from dataclasses import dataclass

from railscope.probes.processes.owner import ProcessOwner, ProcessUsage
from railscope.probes.processes.processes import ProcessIdentity


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that maps NCCL, as far as it is known."""

    identity: ProcessIdentity
    owner: ProcessOwner | None
    """None: not read yet, or it may not be read."""
    usage: ProcessUsage | None
    """None likewise."""


def describe_process(pid: int, owner: ProcessOwner | None) -> str:
    """`process 4711 of ada, "python3 train.py"`, as far as it is known.

    In quotation marks, which the name of a program cannot end: it says nothing about what stands behind it.
    """
    words = f"process {pid}"
    if owner is not None and owner.user:
        words += f" of {owner.user}"
    if owner is not None and owner.program:
        words += ', "{}"'.format(owner.program.replace('"', "'"))
    return words
