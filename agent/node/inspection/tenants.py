"""Whose a process is: the unit in which work on what tenants control is shared out.

A tenant is a user, and within a container runtime the pod or container, where every process may be called root.  Both
come from the kernel: the real user ID, which a setuid program keeps, and the control group, whose outer part only the
runtime can write.  Of nested names the outermost counts: a tenant that is given a part of the tree may name what is
below it as he likes.  What lies below a user's own systemd is that user, however many containers he names there.  And
what runs in a user namespace is its maker, unless that is root: with subordinate numbers (subuid(5)) one user may be
many there.  The kernel's programs share out by the same rule, as far as they can see (probes/bpf/answerable.h).

Sources: user_namespaces(7), proc_pid_status(5) (`Uid`: real, effective, saved, file system), cgroups(7), and the
runtimes' names as in agent/node/targets/jobs.py.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.processes.namespaces import maker_of_user_namespace
from railscope.probes.processes.processes import cgroup, system_part

_UID: Final = re.compile(rb"^Uid:\t(\d+)", re.MULTILINE)
_STATUS_BYTES: Final = 16 << 10
_POD: Final = re.compile(
    r"[/-]pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
)
_CONTAINER: Final = re.compile(r"[/:-]([0-9a-f]{64})(?:\.scope)?(?=/|$)")


@dataclass(frozen=True, slots=True, order=True)
class Tenant:
    """Who is answerable for a process, a file that it maps, or a communicator."""

    uid: int | None
    """Real user ID as this host numbers it, or that of who made its user namespace; None: it cannot be read."""
    container: str = ""
    """Identifier of the pod, else of the container; empty: none is seen."""

    @property
    def label(self) -> str:
        """For metrics and logs: `unknown`, `1000`, or `0/0f3a…` with the first twelve digits of the container."""
        uid = "unknown" if self.uid is None else str(self.uid)
        return f"{uid}/{self.container[:12]}" if self.container else uid

    def is_other_user(self, other: Tenant) -> bool:
        """Whether this is for certain another user of the host.

        In a container there are what users its maker says, and pods of several may share a job.
        """
        return (
            not self.container and not other.container and None not in (self.uid, other.uid) and self.uid != other.uid
        )


UNKNOWN_TENANT: Final = Tenant(None)
ROOT: Final = Tenant(0)
"""Root of the host, outside containers: trusted."""


def sum_by_user(counts: Mapping[Tenant, int]) -> Mapping[int | None, int]:
    """What tenants lost, say, by uid; None: not known."""
    by_user: Counter[int | None] = Counter()
    for tenant, count in counts.items():
        by_user[tenant.uid] += count
    return by_user


def tenant_of(procfs: Path, pid: int) -> Tenant:
    """Which tenant a process belongs to, as far as it can be read; never raises for a process that has gone."""
    return Tenant(maker_of_user_namespace(procfs, pid) or real_uid(procfs, pid), _container(cgroup(procfs, pid) or ""))


def real_uid(procfs: Path, pid: int) -> int | None:
    """As whom a process runs, as this host numbers users; None: it has gone, or cannot be read."""
    try:
        descriptor = os.open(f"{procfs}/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = _UID.search(os.read(descriptor, _STATUS_BYTES))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return int(found[1]) if found is not None else None


def _container(path: str) -> str:
    path = system_part(path)
    pod, container = _POD.search(path), _CONTAINER.search(path)
    if pod is not None:
        return pod[1].replace("_", "").replace("-", "")
    return container[1] if container is not None else ""
