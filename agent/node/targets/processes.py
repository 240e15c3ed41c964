"""Processes that are observed, as the rooms of the node know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from railscope.agent.node.targets.jobs import JobFacts
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.processes import ProcessIdentity


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """A process that maps NCCL."""

    identity: ProcessIdentity
    namespace: NetworkNamespace | None
    """Its network namespace; None: it could not be read."""
    job: JobFacts
    socket_interfaces: str
    """The job's NCCL_SOCKET_IFNAME; empty where it has none."""
    nccl_version: str
    program: int | None = None
    """Which program it runs, by `railscope.probes.processes.processes.program_mark`."""
    ended_ns: int | None = None


ProcessOf = Callable[[int], ObservedProcess | None]
"""By pid."""
