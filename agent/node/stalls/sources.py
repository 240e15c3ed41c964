"""The interfaces through which the stalls' room reads the rest of the agent and the kernel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from railscope.agent.facts.stall import Disagreement, LastCollectives
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.stalls.evidence import ProcessFacts, RailSigns
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.memory.proxy_work import ProxyWorkLayout
from railscope.probes.nccl.programs.internals import Sent
from railscope.probes.processes.owner import ProcessOwner


class Inspection(Protocol):
    """What is needed of a closer look (agent/node/stalls/inspector.py)."""

    @property
    def open(self) -> bool: ...
    def bridge(self, gap_ns: int) -> None: ...
    def process(self, process: ObservedProcess) -> ProcessFacts: ...
    def outdate(self, process: ObservedProcess) -> None: ...
    def is_ending(self, process: ObservedProcess) -> bool: ...
    def written_bytes(self, process: ObservedProcess, *, closely: bool) -> int | None: ...
    def waits_for_network(self, process: ObservedProcess) -> tuple[str, ...]: ...
    def remember_threads(self, process: ObservedProcess) -> None: ...
    def rails(self, process: ObservedProcess, devices: frozenset[str]) -> tuple[RailSigns, ...]: ...
    def why_hidden(self, process: ObservedProcess) -> str: ...
    def forget(self, pid: int) -> None: ...
    def close_unused(self) -> None: ...
    def close(self) -> None: ...


class InFlightTables(Protocol):
    """What is needed of the programs below the entry points (probes/nccl/programs/internals.py)."""

    def operations(self) -> tuple[Records, Records]: ...
    def connections(self) -> tuple[Records, Records]: ...
    def histories(self) -> tuple[Records, Records]: ...
    def sent(self) -> list[Sent]: ...


class Known(Protocol):
    """What the rest of the agent knows."""

    def communicator(self, instance: int) -> Communicator | None: ...

    def communicator_changes(self) -> int:
        """A number that is another one whenever anything that is known of a communicator has changed."""

    def unmade(self, pid: int) -> Collection[Communicator]:
        """Communicators of a process that NCCL may still be making: their structs do not tell who they are."""

    def ended(self, comm: str) -> Collection[str]:
        """Ranks of this host whose end of a communicator, by its name, has ended."""

    def process(self, pid: int) -> ObservedProcess | None: ...

    def owner(self, pid: int) -> ProcessOwner | None:
        """The owner of a process; None: not known.  Never waits for the process."""

    def completed(self, instance: int) -> int | None:
        """Calls of a communicator that are complete; None: completion cannot be seen."""

    def position(self, instance: int, calls: int) -> int | None:
        """Collectives entered since a communicator was made, as NCCL counts, when it made so many calls.

        None: unknown.
        """

    def disagreement(self, comm: str) -> Disagreement | None:
        """The first of the last collectives that ranks of a communicator on this host did not make alike.

        None: they made all of them alike, they make calls just now, or it is unknown.
        """

    def last_collectives(self, instance: int) -> LastCollectives[str] | None:
        """The last few collectives of a communicator that makes no call now; None: they are unknown."""

    def proxy_layout(self, library: int) -> ProxyWorkLayout | None:
        """By number of the library."""

    def devices(self, pid: int, numbers: Collection[int]) -> frozenset[str]:
        """Names of a process's network devices by NCCL's numbers; empty where one of them is not known."""

    def calls_unprobed(self, library: int) -> bool:
        """Whether no call of a library, by its number, need meet a probe: NCCL's own numbers tell of them."""

    def level(self) -> Level:
        """The current level; tables of what is not observed hold their last values."""
