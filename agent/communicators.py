"""Who is who: the communicators that the probes have seen, and the processes they belong to.

A communicator's identity comes from its own struct, read in the kernel and confirmed by NCCL's magic numbers; where
the layout is not known, rank and number of ranks come from the init call's arguments and the hash stays unknown.
An instance is one communicator's life: the same address used again later is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from agent.jobs import JobFacts
from agent.snapshot import UNKNOWN
from agent.wire import Placement, placement_of
from probes.maps import Map, Records
from probes.namespaces import NetworkNamespace
from probes.nccl.records import LifecycleKind
from probes.processes import ProcessIdentity

_log = logging.getLogger("railscope.communicators")

_ENDS = (LifecycleKind.DESTROY, LifecycleKind.ABORT)


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
    ended_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Communicator:
    """One rank's end of one communicator."""

    instance: int
    tgid: int
    first_ns: int
    comm_hash: int | None = None
    rank: int | None = None
    nranks: int | None = None
    cuda_dev: int | None = None
    nvml_dev: int | None = None
    node: int | None = None
    n_nodes: int | None = None
    local_ranks: int | None = None
    source: str = UNKNOWN
    ended_ns: int | None = None

    @property
    def name(self) -> str:
        return UNKNOWN if self.comm_hash is None else f"{self.comm_hash:016x}"

    @property
    def gpu(self) -> str:
        """The GPU's index as nvidia-smi counts, or as the process counts where that is not known."""
        return text(self.cuda_dev if self.nvml_dev is None else self.nvml_dev)

    @property
    def placement(self) -> Placement | None:
        return placement_of(
            *(-1 if v is None else v for v in (self.rank, self.nranks, self.node, self.n_nodes, self.local_ranks))
        )


def text(value: int | None) -> str:
    """A number as a label."""
    return UNKNOWN if value is None else str(value)


def _known(value: int) -> int | None:
    return value if value >= 0 else None


class Communicators:
    """Every instance seen and not forgotten yet.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, table: Map) -> None:
        self._table = table
        self._known: dict[int, Communicator] = {}
        self._settled: set[int] = set()
        """Instances that ended and are no longer in the kernel's table."""

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._known.values())

    def get(self, instance: int) -> Communicator | None:
        return self._known.get(instance)

    def take(self, events: Records) -> set[int]:
        """Learn from lifecycle events (dtype LIFECYCLE_EVENT); returns the processes they came from."""
        processes = set()
        for event in events:
            processes.add(int(event["tgid"]))
            kind = LifecycleKind(int(event["kind"]))
            instance = int(event["instance"])
            if not instance:
                _log.info("process %d: %s returned %d", event["tgid"], kind.name, event["result"])
                continue
            time_ns = int(event["time_ns"])
            known = self._known.get(instance) or Communicator(instance, int(event["tgid"]), time_ns)
            if event["confirmed"]:
                known = _identified(known, event["identity"])
            elif known.source == UNKNOWN and int(event["nranks"]) > 0:
                rank = _known(int(event["rank"]))
                known = replace(
                    known, nranks=int(event["nranks"]), rank=rank, source="init" if rank is not None else UNKNOWN
                )
            if kind in _ENDS:
                known = replace(known, ended_ns=known.ended_ns or time_ns)
            self._known[instance] = known
        return processes

    def refresh(self) -> set[int]:
        """Learn from the kernel's table what lost events would have told; returns the processes in it.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        keys, values = self._table.read()
        for key, value in zip(keys, values, strict=True):
            instance = int(value["instance"])
            known = self._known.get(instance) or Communicator(instance, int(key["tgid"]), int(value["first_ns"]))
            if value["confirmed"] and known.source != "layout":
                known = _identified(known, value["identity"])
            if value["destroyed_ns"] and known.ended_ns is None:
                known = replace(known, ended_ns=int(value["destroyed_ns"]))
            self._known[instance] = known
        return set(keys["tgid"].tolist())

    def end_process(self, tgid: int, now_ns: int) -> None:
        """End everything that a process had, and take it out of the kernel's table."""
        for instance, known in self._known.items():
            if known.tgid == tgid and known.ended_ns is None:
                self._known[instance] = replace(known, ended_ns=now_ns)
        keys, _ = self._table.read()
        for key in keys[keys["tgid"] == tgid]:
            self._table.delete(key.tobytes())

    def settle(self, before_ns: int) -> set[int]:
        """Take communicators that ended before a moment out of the kernel's table; returns their instances.

        Jobs that make and destroy communicators all the time would fill the kernel's tables otherwise.
        """
        ended = {
            known.instance
            for known in self._known.values()
            if known.ended_ns is not None and known.ended_ns < before_ns and known.instance not in self._settled
        }
        if ended:
            self._settled |= ended
            keys, values = self._table.read()
            for key, value in zip(keys, values, strict=True):
                if int(value["instance"]) in ended:
                    self._table.delete(key.tobytes())
        return ended

    def forget(self, before_ns: int, most_ended: int) -> list[Communicator]:
        """Drop what ended before a moment, and the oldest of more than `most_ended`; returns what was dropped."""
        ended = sorted(
            (known for known in self._known.values() if known.ended_ns is not None and known.instance in self._settled),
            key=lambda known: known.ended_ns or 0,
        )
        too_many = max(0, len(ended) - most_ended)
        old = [known for at, known in enumerate(ended) if at < too_many or (known.ended_ns or 0) < before_ns]
        for known in old:
            del self._known[known.instance]
            self._settled.discard(known.instance)
        return old


def _identified(known: Communicator, identity: Records) -> Communicator:
    return replace(
        known,
        comm_hash=int(identity["comm_hash"]),
        rank=int(identity["rank"]),
        nranks=int(identity["nranks"]),
        cuda_dev=_known(int(identity["cuda_dev"])),
        nvml_dev=_known(int(identity["nvml_dev"])),
        node=_known(int(identity["node"])),
        n_nodes=_known(int(identity["n_nodes"])),
        local_ranks=_known(int(identity["local_ranks"])),
        source="layout",
    )
