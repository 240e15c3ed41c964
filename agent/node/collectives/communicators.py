"""Tracks the communicators that the probes have seen, and the processes they belong to.

A communicator's identity comes from its own struct, read in the kernel and confirmed by NCCL's magic numbers; where
the layout is not known, rank, number of ranks and the hash of the unique id come from the init call's arguments.
An instance is one communicator's life: the same address used again later is another one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import NO_GPU, RankGpu
from railscope.agent.model.edge_share import Placement, placement_of
from railscope.agent.node.collectives.call_counts import Table
from railscope.agent.node.collectives.events import error_name
from railscope.agent.node.collectives.name_claims import NameClaims
from railscope.agent.node.collectives.rank_gpus import RankGpus
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.comm_hash import comm_hash
from railscope.probes.nccl.records.calls import COMMUNICATOR, COMMUNICATOR_KEY, LifecycleKind
from railscope.probes.nccl.records.errors import NO_ERRORS, Result

_log = logging.getLogger("railscope.communicators")

_BIRTHS = {
    LifecycleKind.INIT: "ncclCommInitRank",  # and its variants
    LifecycleKind.INIT_ALL: "ncclCommInitAll",
    LifecycleKind.SPLIT: "ncclCommSplit",
    LifecycleKind.SHRINK: "ncclCommShrink",
    LifecycleKind.GROW: "ncclCommGrow",
}
"""What makes communicators, as the job calls it."""
_MOST_SAID: Final = 16
"""Different things that are said of one process."""
_ENDS = (LifecycleKind.DESTROY, LifecycleKind.ABORT)
_TOLD: Final = ("instance", "confirmed", "destroyed_ns")
"""Of a row of the kernel's table, what tells something new when it changes."""


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
    bus_id: int | None = None
    """The GPU's PCI address, as NCCL's number (agent/node/collectives/rank_gpus.py)."""
    on: RankGpu = NO_GPU
    """Which GPU of this host that is."""
    node: int | None = None
    n_nodes: int | None = None
    local_ranks: int | None = None
    source: str = UNKNOWN
    ended_ns: int | None = None
    whole: bool = False
    """Seen from its first call on: its calls are numbered as those of other ranks are."""
    mark: str = ""
    """What tells it from those of another process that had its name first (agent/node/collectives/name_claims.py)."""
    name: str = field(init=False, compare=False)
    """Its hash as people have it, with the mark; asked for at each look at each of thousands."""

    def __post_init__(self) -> None:
        name = UNKNOWN if self.comm_hash is None else f"{self.comm_hash:016x}"
        object.__setattr__(self, "name", f"{name}~{self.mark}" if self.mark and self.comm_hash is not None else name)

    @property
    def gpu(self) -> str:
        """The GPU's number in this host's NVML, as nvidia-smi counts; never CUDA's."""
        return self.on.number

    @property
    def placement(self) -> Placement | None:
        return placement_of(
            *(-1 if v is None else v for v in (self.rank, self.nranks, self.node, self.n_nodes, self.local_ranks))
        )


def format_label(value: int | None) -> str:
    """A number of a communicator (rank, ranks, GPU) as a label."""
    return UNKNOWN if value is None else str(value)


def _value_or_none(value: int) -> int | None:
    return value if value >= 0 else None


class Communicators:
    """Every instance seen and not forgotten yet.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, table: Table, version_of: Callable[[int], str], claims: NameClaims, gpus: RankGpus) -> None:
        """`version_of` returns a process's NCCL version by pid: `unknown` if it is not known (yet)."""
        self._gpus = gpus
        self._claims = claims
        self._table = table
        self._version_of = version_of
        self._named_now: list[int] = []
        """Those that were just named by their unique id."""
        self._unnamed: dict[int, bytes] = {}
        """Unique ids of communicators whose hash is not known, by instance."""
        self._keys: dict[int, bytes] = {}
        """Keys in the kernel's table at the last refresh, by instance."""
        self.rows: tuple[Records, Records] = (np.zeros(0, COMMUNICATOR_KEY), np.zeros(0, COMMUNICATOR))
        """Keys and values of the kernel's table at the last refresh."""
        self._refreshed = b""
        """What of those rows tells something of a communicator, if nothing was put away since."""
        self.changes = 0
        """Rises whenever anything that is known of a communicator changes."""
        self._known: dict[int, Communicator] = {}
        self._settled: dict[int, Communicator] = {}
        """Those that ended and are no longer in the kernel's table: nothing about them changes any more."""
        self._said: defaultdict[int, set[str]] = defaultdict(set)
        """What the log has of calls that made nothing, by process."""
        self._of_process: defaultdict[int, set[int]] = defaultdict(set)
        """Instances that are not settled, by process."""
        self._of_hash: defaultdict[int, set[int]] = defaultdict(set)
        """Instances, settled ones too, by NCCL's hash."""
        self._uncounted: defaultdict[int, int] = defaultdict(int)
        """Calls that met no probe, by instance."""
        self._were_whole: set[int] = set()
        """Those of these instances that were seen from their first call on."""
        self._no_longer_whole: list[int] = []
        """Those that were told to nobody yet."""

    def find_gpus_again(self) -> None:
        """More is known of the host's GPUs, or of processes."""
        for known in list(self._known.values()):
            self._keep(known)

    def __iter__(self) -> Iterator[Communicator]:
        """Those that are not settled."""
        return iter(self._known.values())

    def seen_late(self) -> Iterator[int]:
        """Instances, archived ones too, that were not seen from their first call on."""
        return (
            one.instance
            for known in (self._known, self._settled)
            for one in known.values()
            if not one.whole and one.instance not in self._were_whole
        )

    def add_uncounted(self, instance: int, calls: int) -> None:
        """Calls of a communicator met no probe: those that do are no longer numbered as other ranks' are."""
        self._uncounted[instance] += calls
        known = self._known.get(instance)
        if known is not None and known.whole:
            self._were_whole.add(instance)
            self._no_longer_whole.append(instance)
            self._keep(replace(known, whole=False))

    def pop_no_longer_whole(self) -> list[int]:
        """Instances of which calls were missed for the first time since this was asked last."""
        found, self._no_longer_whole = self._no_longer_whole, []
        return found

    def uncounted(self, instance: int) -> int:
        """Calls of a communicator that met no probe, as far as that is known."""
        return self._uncounted.get(instance, 0)

    def is_whole(self, instance: int) -> bool:
        """Whether it was seen from its first call on, and every call since."""
        known = self._known.get(instance)
        return known is not None and known.whole

    def first_of(self, tgid: int) -> Communicator | None:
        """The first communicator of a process that is not settled; None: it has none."""
        return min((self._known[one] for one in self._of_process.get(tgid, ())), key=_began, default=None)

    def unmade(self, tgid: int) -> list[Communicator]:
        """Communicators of a process that live and whose struct was not read yet, as while NCCL makes them."""
        known = (self._known[one] for one in self._of_process.get(tgid, ()))
        return [one for one in known if one.ended_ns is None and one.source != "layout"]

    def get(self, instance: int) -> Communicator | None:
        return self._known.get(instance) or self._settled.get(instance)

    def key_of(self, instance: int) -> bytes | None:
        """Its key in the kernel's table at the last refresh; None: it was not there."""
        return self._keys.get(instance)

    def is_archived(self, instance: int) -> bool:
        return instance in self._settled

    def living_ranks(self, name: str) -> list[Communicator]:
        """The ends of a communicator on this host that have not ended, by its name."""
        if name == UNKNOWN:
            return []
        numbered = self._of_hash.get(int(name.partition("~")[0], 16), ())
        ends = [self._known[instance] for instance in numbered if instance in self._known]
        return [end for end in ends if end.name == name and end.ended_ns is None]

    def ended_ranks(self, name: str) -> set[str]:
        """Ranks whose end of a communicator has ended, by its name: none where that is not known."""
        return {format_label(one.rank) for one in self.ended_ends(name)}

    def ended_ends(self, name: str) -> list[Communicator]:
        """The ends of a communicator on this host that have ended, by its name; those without a rank are left out."""
        if name == UNKNOWN:
            return []
        numbered = self._of_hash.get(int(name.partition("~")[0], 16), ())
        ends = [end for one in numbered if (end := self.get(one)) is not None and end.name == name]
        # Where jobs fix NCCL's id, the next one's communicator has the same name.
        living = {one.rank for one in ends if one.ended_ns is None}
        return [one for one in ends if one.ended_ns is not None and one.rank is not None and one.rank not in living]

    def record_events(self, events: Records) -> set[int]:
        """Record lifecycle events (dtype LIFECYCLE_EVENT); returns the processes they came from."""
        processes = set()
        for event in events:
            processes.add(int(event["tgid"]))
            kind = LifecycleKind(int(event["kind"]))
            instance = int(event["instance"])
            if not instance:
                self._say(int(event["tgid"]), _nothing_made(kind, event))
                continue
            if instance in self._settled:
                continue
            time_ns = int(event["time_ns"])
            known = self._known.get(instance) or Communicator(instance, int(event["tgid"]), time_ns)
            if event["confirmed"]:
                known = _identified(known, event["identity"])
            elif known.source == UNKNOWN and int(event["nranks"]) > 0:
                rank = _value_or_none(int(event["rank"]))
                known = replace(
                    known, nranks=int(event["nranks"]), rank=rank, source="init" if rank is not None else UNKNOWN
                )
            if kind is LifecycleKind.INIT and event["has_unique_id"] and known.comm_hash is None:
                self._unnamed[instance] = event["unique_id"].tobytes()
            if kind in _BIRTHS and instance not in self._were_whole:
                known = replace(known, whole=True)
            if kind in _ENDS:
                known = replace(known, ended_ns=known.ended_ns or time_ns)
            if kind is LifecycleKind.DEVICE_COMM:
                self._say(
                    known.tgid,
                    f"kernels of communicator {known.name} may communicate by themselves from now on "
                    "(ncclDevCommCreate): no call tells what they move",
                )
            self._keep(known)
        self._name_by_unique_id()
        self._claim_names(int(event["instance"]) for event in events)
        return processes

    def _say(self, tgid: int, words: str) -> None:
        """Say something of a process once: it may do the same thousands of times."""
        said = self._said[tgid]
        _log.log(
            logging.DEBUG if words in said or len(said) >= _MOST_SAID else logging.INFO, "process %d: %s", tgid, words
        )
        if len(said) < _MOST_SAID:
            said.add(words)

    def _claim_names(self, instances: Iterable[int]) -> None:
        """Mark those whose name another process had first."""
        fresh = {instance for instance in (*instances, *self._named_now) if not self._claims.is_decided(instance)}
        self._named_now.clear()
        known = [one for instance in fresh if (one := self._known.get(instance)) is not None]
        for one in sorted(known, key=lambda one: one.first_ns):
            if mark := self._claims.claim(one, self._known.get):
                self._keep(replace(one, mark=mark))

    def _name_by_unique_id(self) -> None:
        """Name those whose struct cannot be read, as NCCL names them."""
        for instance, unique_id in list(self._unnamed.items()):
            known = self._known.get(instance)
            if known is not None and known.comm_hash is None:
                found = comm_hash(unique_id, self._version_of(known.tgid))
                if found is None:
                    continue
                source = "init" if known.source == UNKNOWN else known.source
                self._keep(replace(known, comm_hash=found, source=source))
                self._named_now.append(instance)
            del self._unnamed[instance]

    def refresh(self) -> set[int]:
        """Recover lost events from the kernel's table; returns the processes in it.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        self.rows = keys, values = self._table.read()
        told = b"".join(one.tobytes() for one in (keys, *(values[name] for name in _TOLD)))
        changed = told != self._refreshed
        if changed:
            self._recover(keys, values)
            self._refreshed = told
        self._name_by_unique_id()
        self._claim_names(values["instance"].tolist() if changed else ())
        return set(keys["tgid"].tolist())

    def _recover(self, keys: Records, values: Records) -> None:
        self._keys.clear()
        raw, size = keys.tobytes(), keys.dtype.itemsize
        columns = (values[name].tolist() for name in ("instance", "first_ns", "confirmed", "destroyed_ns"))
        for at, (tgid, instance, first_ns, confirmed, destroyed_ns) in enumerate(
            zip(keys["tgid"].tolist(), *columns, strict=True)
        ):
            self._keys[instance] = raw[at * size : (at + 1) * size]
            if instance in self._settled:
                continue
            known = self._known.get(instance) or Communicator(instance, tgid, first_ns)
            if confirmed and known.source != "layout":
                known = _identified(known, values["identity"][at])
            if destroyed_ns and known.ended_ns is None:
                known = replace(known, ended_ns=destroyed_ns)
            self._keep(known)

    def end_process(self, tgid: int, ended_ns: int) -> None:
        """End everything that a process had; what begins later belongs to another one with the same number."""
        self._said.pop(tgid, None)
        for instance in self._of_process.get(tgid, ()):
            known = self._known[instance]
            if known.ended_ns is None and known.first_ns <= ended_ns:
                self._known[instance] = replace(known, ended_ns=ended_ns)
                self.changes += 1

    def archive(self, before_ns: int, gone: Collection[int]) -> list[Communicator]:
        """Archive communicators that ended before a moment, and all that ended in processes that are gone.

        Returns them; `sweep` takes them out of the kernel's table.
        """
        ended = [
            known
            for known in self._known.values()
            if known.ended_ns is not None and (known.ended_ns < before_ns or known.tgid in gone)
        ]
        for known in ended:
            self._settled[known.instance] = self._known.pop(known.instance)
            _remove(self._of_process, known.tgid, known.instance)
            self._claims.release(known)
        if ended:
            self._changed()
        return ended

    def delete_archived(self) -> None:
        """Delete archived communicators from the kernel's table, as it was at the last refresh.

        Jobs that make and destroy communicators all the time would fill the table otherwise.

        Raises:
            KernelRefusal: the table cannot be changed; call again after the next refresh.
        """
        for instance in self._keys.keys() & self._settled.keys():
            row = self._table.lookup(self._keys[instance])
            # The same address may be another communicator by now.
            if row is not None and int(row["instance"][0]) == instance:
                self._table.delete(self._keys[instance])
            del self._keys[instance]
            self._refreshed = b""

    def forget(self, instances: Iterable[int]) -> None:
        """Drop archived communicators that no snapshot shows any more."""
        for instance in instances:
            self._were_whole.discard(instance)
            self._uncounted.pop(instance, None)
            settled = self._settled.pop(instance, None)
            if settled is not None:
                self._changed()
            if settled is not None and settled.comm_hash is not None:
                _remove(self._of_hash, settled.comm_hash, instance)

    def _changed(self) -> None:
        """Some were put away: a row of theirs that is still in the kernel's table is another communicator's."""
        self.changes += 1
        self._refreshed = b""

    def _keep(self, known: Communicator) -> None:
        """Keep what is known of a communicator that is not settled."""
        before = self._known.get(known.instance)
        on = self._gpus.find(known.tgid, known.bus_id, known.nvml_dev)
        if on != known.on:
            known = replace(known, on=on)
        if before is known:
            return
        self.changes += 1
        self._known[known.instance] = known
        if before is None:
            self._of_process[known.tgid].add(known.instance)
        if before is not None and before.comm_hash is not None and before.comm_hash != known.comm_hash:
            _remove(self._of_hash, before.comm_hash, known.instance)
        if known.comm_hash is not None:
            self._of_hash[known.comm_hash].add(known.instance)


def _remove(index: dict[int, set[int]], key: int, instance: int) -> None:
    instances = index.get(key)
    if instances is not None:
        instances.discard(instance)
        if not instances:
            del index[key]


def _began(communicator: Communicator) -> int:
    return communicator.first_ns


def _nothing_made(kind: LifecycleKind, event: Records) -> str:
    """Why no communicator is known after a call that makes one (dtype LIFECYCLE_EVENT), and what follows.

    A split returns none to a rank without a colour, which NCCL takes for success; in a group, or where calls do not
    block, it and a shrink return theirs only when all is done (ncclCommSplit() and ncclCommInitRankFunc() in NCCL's
    init.cc).
    """
    call, result = _BIRTHS.get(kind, kind.name), int(event["result"])
    if result not in NO_ERRORS:
        return f"{call} failed with {error_name(result)} and created no communicator: the job's own log says why"
    if event["comm"]:
        return (
            f"{call} created a communicator beyond the kernel table's limit: its calls count under an unknown "
            "communicator; raise --limit.communicators"
        )
    if kind is LifecycleKind.SPLIT and result == Result.SUCCESS:
        return (
            f"{call} returned no communicator: either the rank is in none of the new ones (NCCL_SPLIT_NOCOLOR), and "
            "nothing is missed, or its group has not ended, and the communicator will be known from its first call on"
        )
    return f"{call} has not returned its communicator yet, which will be known from its first call on"


def _identified(known: Communicator, identity: Records) -> Communicator:
    return replace(
        known,
        # A layout may tell the ranks alone; the init call may have told the rest.
        comm_hash=int(identity["comm_hash"]) or known.comm_hash,
        rank=int(identity["rank"]),
        nranks=int(identity["nranks"]),
        cuda_dev=_value_or_none(int(identity["cuda_dev"])),
        nvml_dev=_value_or_none(int(identity["nvml_dev"])),
        # No GPU is at 0: layouts without the field leave -1.
        bus_id=_value_or_none(int(identity["bus_id"])) or None,
        node=_value_or_none(int(identity["node"])),
        n_nodes=_value_or_none(int(identity["n_nodes"])),
        local_ranks=_value_or_none(int(identity["local_ranks"])),
        source="layout",
    )
