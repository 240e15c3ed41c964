"""Libraries and the kernel's side of what lies below their entry points, simulated: probes that are only noted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from railscope.agent.node.completion.levels import Levels
from railscope.agent.node.inspection.inspection import InProcess, Inspection
from railscope.agent.node.inspection.pages import LoadPages
from railscope.agent.node.inspection.questions import Found, NotYet, Question
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, ProbePoint
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.internals import InternalPoints, Level
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.internals import EmptyRun, Launch, Progress, Sent
from railscope.probes.nccl.records.errors import ERROR_EVENT, ErrorLayout
from railscope.probes.nccl.records.failover import FAILOVER_EVENT
from railscope.probes.nccl.records.internals import CONNECTION, CONNECTION_KEY, DISTRIBUTION, InternalStat
from railscope.probes.processes.processes import ProcessIdentity

A = TypeVar("A")

BUILD_ID = "855c15bcfbac035d484e5b6c3348bffa19387e0e"  # 2.32.3
EVERYTHING = ("proxy_post", "proxy_stop", "plan_replay", "socket_send", "ib_send", "plan_launch")


@dataclass(slots=True)
class SimulatedLibrary:
    number: int = 3
    path: str = "/opt/libnccl.so.2"
    descriptor: int = -1
    build_id: str | None = BUILD_ID
    nccl_version: str = "2.32.3"
    mappers: frozenset[ProcessIdentity] = frozenset()
    tenant: Tenant = UNKNOWN_TENANT
    local: bool = True


def simulated_link() -> Links:
    """One link, with a descriptor that stands for the kernel's."""
    links = Links()
    links._descriptors.append(os.dup(0))
    return links


class LoadingPages(InProcess):
    """Has not read the pages of any file yet, until it is said to have."""

    loaded = False

    def ask(self, tenant: Tenant, question: Question[A], descriptors: Collection[int] = ()) -> Found[A]:
        if isinstance(question, LoadPages) and not self.loaded:
            raise NotYet
        return super().ask(tenant, question, descriptors)


@dataclass(slots=True)
class SimulatedPrograms:
    log: list[str] = field(default_factory=list)
    described: dict[int, bool] = field(default_factory=dict)
    watched: dict[int, tuple[str, ErrorLayout | None]] = field(default_factory=dict)
    attached: dict[Level, Links] = field(default_factory=dict)
    error_links: Links = field(default_factory=Links)
    refuses: Level | None = None
    states: dict[int, Progress] = field(default_factory=dict)
    discarded: dict[int, EmptyRun] = field(default_factory=dict)
    unreadable: bool = False

    def describe(self, library: int, layout: Records | None) -> None:
        self.described[library] = layout is not None

    def attach(self, path: str, points: InternalPoints, level: Level) -> Links:
        assert path.startswith("/proc/self/fd/")
        assert points.at(level)
        if level is self.refuses:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        self.log.append(f"+{level.name}")
        links = self.attached[level] = simulated_link()
        return links

    def still_attached(self) -> list[str]:
        return [level.name for level, links in self.attached.items() if len(links)]

    def watch_errors(self, path: str, points: Sequence[ProbePoint], library: int, layout: ErrorLayout | None) -> Links:
        del points
        self.watched[library] = (path, layout)
        self.error_links = simulated_link()
        return self.error_links

    def watch_failover(self, path: str, points: Sequence[ProbePoint]) -> Links:
        del points
        self.log.append(f"failover of {path}")
        return simulated_link()

    def error_events(self) -> Records:
        return np.zeros(0, ERROR_EVENT)

    def failover_events(self) -> Records:
        return np.zeros(0, FAILOVER_EVENT)

    def connections(self) -> tuple[Records, Records]:
        return np.zeros(0, CONNECTION_KEY), np.zeros(0, CONNECTION)

    def forget_failed_over(self, connections: Iterable[tuple[int, int]]) -> None:
        self.log.append(f"forget failed over {sorted(connections)}")

    def forget_library(self, library: int) -> None:
        self.log.append(f"forget {library}")

    def progress(self) -> dict[int, Progress]:
        if self.unreadable:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        return self.states

    def empty_runs(self) -> dict[int, EmptyRun]:
        return self.discarded

    def durations(self) -> dict[Op, Records]:
        one = np.zeros(1, DISTRIBUTION)
        one["count"], one["sum"] = 2, 3_000_000_000
        one["buckets"][0, 5] = 2
        return {Op.AllReduce: one[0]}

    def bandwidths(self) -> dict[Op, Records]:
        return {}

    def launches(self) -> list[Launch]:
        return [Launch(4, 1, 2, 8, 5), Launch(4, 0xFE, 0xFF, 1, 1), Launch(4, 0xFF, 0xFF, 1, 2)]

    def sent(self) -> list[Sent]:
        return []

    def stats(self) -> dict[InternalStat, int]:
        return dict.fromkeys(InternalStat, 1)

    def forget_processes(self, tgids: Collection[int]) -> None:
        self.log.append(f"forget processes {sorted(tgids)}")

    def forget_sent(self, tgids: Collection[int]) -> None:
        self.log.append(f"forget sent {sorted(tgids)}")

    def forget_communicators(self, instances: set[int]) -> None:
        self.log.append(f"forget communicators {sorted(instances)}")

    def close(self) -> None:
        self.log.append("closed")


def levels_of(
    programs: SimulatedPrograms,
    wanted: Level,
    before_forgetting: Callable[[], object] = lambda: None,
    inspection: Inspection | None = None,
) -> Levels:
    return Levels(programs, Layouts.load().structures, wanted, inspection or InProcess(), before_forgetting)
