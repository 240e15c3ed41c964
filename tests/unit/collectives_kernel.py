"""The kernel's side of the collectives' tables, simulated: they hold what a test wrote, and can refuse."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.programs.shapes import WINDOW
from railscope.probes.nccl.records import calls as records
from railscope.probes.nccl.records.calls import LifecycleKind, Stat

CPUS = 2


class SimulatedTable:
    """A map of the kernel in memory."""

    def __init__(self, key: np.dtype[Any], value: np.dtype[Any], *, per_cpu: bool = False) -> None:
        self._key, self._value, self._per_cpu = key, value, per_cpu
        self.rows: dict[bytes, Records] = {}
        self.reads = 0
        self.refuses = False

    def read(self) -> tuple[Records, Records]:
        self.reads += 1
        self._refuse()
        keys = np.frombuffer(b"".join(self.rows), self._key)
        shape = (len(self.rows), CPUS) if self._per_cpu else (len(self.rows),)
        return keys, np.frombuffer(b"".join(row.tobytes() for row in self.rows.values()), self._value).reshape(shape)

    def lookup(self, key: bytes) -> Records | None:
        self._refuse()
        row = self.rows.get(key)
        return None if row is None else row.copy()

    def calls_of(self, key: bytes, instance: int) -> int | None:
        """Of a table of communicators."""
        row = self.lookup(key)
        return None if row is None or row["instance"][0] != instance else int(row["sequence"][0])

    def delete(self, key: bytes) -> None:
        self._refuse()
        self.rows.pop(key, None)

    def _refuse(self) -> None:
        if self.refuses:
            raise KernelRefusal(errno.EPERM, "simulated refusal")


class SimulatedEvents:
    """A ring whose events wait until they are read."""

    def __init__(self) -> None:
        self.waiting: list[Records] = []

    def read(self) -> Records:
        events, self.waiting = self.waiting, []
        return np.concatenate(events) if events else np.zeros(0, records.LIFECYCLE_EVENT)


class SimulatedShares:
    """Who holds how much of the tables: what was refused is what a test says."""

    def __init__(self) -> None:
        self.lost: dict[tuple[str, int | None], int] = {}

    def refused(self) -> dict[tuple[str, int | None], int]:
        return dict(self.lost)


class SimulatedHostCalls:
    """Calls under way: what a test puts there, by thread."""

    def __init__(self) -> None:
        self.rows: dict[int, Records] = {}

    def call(self, tid: int, start_ns: int, kind: LifecycleKind, *, tgid: int, **fields: Any) -> None:
        """A thread is in a call; `fields` are those of HOST_CALL."""
        row = np.zeros(1, records.HOST_CALL)
        row["start_ns"], row["kind"], row["tgid"], row["nranks"], row["rank"] = start_ns, int(kind), tgid, -1, -1
        for name, value in fields.items():
            row[name] = value
        self.rows[tid] = row

    def read(self) -> tuple[Records, Records]:
        rows = list(self.rows.values())
        values = np.concatenate(rows) if rows else np.zeros(0, records.HOST_CALL)
        return np.array(list(self.rows), "<u4"), values

    def drop(self, ended: Iterable[tuple[int, int]]) -> None:
        for tid, start_ns in ended:
            if tid in self.rows and self.rows[tid]["start_ns"][0] == start_ns:
                del self.rows[tid]


class SimulatedShapes:
    """What the collectives of communicators were, by instance: words as the programs write them."""

    def __init__(self) -> None:
        self.made: dict[int, list[int]] = {}

    def make(self, instance: int, op: int = 4, *, times: int = 1, payload: int = 1024, root: int = 0xFFFF) -> None:
        """Collectives of float32."""
        data_type = 7 if op in (1, 3, 4) else 0
        word = payload << 24 | root << 8 | data_type << 4 | op
        self.made.setdefault(instance, []).extend([word] * times)

    def blocks(self, instances: Sequence[int]) -> npt.NDArray[np.uint64]:
        found = np.zeros((len(instances), records.BLOCK_LEVELS), np.uint64)
        for at, instance in enumerate(instances):
            made = self.made.get(instance, [])
            for level in range(records.BLOCK_LEVELS):
                length = WINDOW << level
                last = len(made) // length * length
                if last:
                    signature = zlib.crc32(np.array(made[last - length : last], "<u8").tobytes())
                    found[at, level] = signature << 32 | last // WINDOW
        return found

    def recent(self, instance: int, calls: int) -> tuple[int, tuple[int, ...]] | None:
        made = self.made.get(instance)
        return None if made is None or calls < len(made) else (len(made), tuple(made[-WINDOW:]))


class SimulatedPrograms:
    """What agent/node/collectives/collectives.py needs of `NcclPrograms`."""

    def __init__(self) -> None:
        self.aggregates = SimulatedTable(records.AGGREGATE_KEY, records.AGGREGATE, per_cpu=True)
        self.communicators = SimulatedTable(records.COMMUNICATOR_KEY, records.COMMUNICATOR)
        self.lifecycle_events = SimulatedEvents()
        self.host_calls = SimulatedHostCalls()
        self.shares = SimulatedShares()
        self.shapes = SimulatedShapes()
        self.refuses_totals = False
        self._overflow = np.zeros((16, 16), records.AGGREGATE)
        self._enqueue_times = np.zeros(16, records.ENQUEUE_TIME)

    def call(self, tgid: int, instance: int, calls: int = 1, *, op: int = 4, bytes_each: int = 1024) -> None:
        """Count calls of float32 on the first CPU."""
        key = np.zeros(1, records.AGGREGATE_KEY)
        key["tgid"], key["instance"], key["peer"], key["op"] = tgid, instance, -1, op
        key["data_type"], key["size_bucket"] = 7, (bytes_each - 1).bit_length()
        row = self.aggregates.rows.setdefault(key.tobytes(), np.zeros(CPUS, records.AGGREGATE))
        row["calls"][0] += calls
        row["payload_bytes"][0] += calls * bytes_each

    def communicator(
        self, tgid: int, instance: int, *, first_ns: int = 1, comm: int | None = None, **identity: int
    ) -> None:
        """One rank of two, alone on its node, confirmed; `identity` are fields of IDENTITY."""
        key, row = np.zeros(1, records.COMMUNICATOR_KEY), np.zeros(1, records.COMMUNICATOR)
        key["comm"], key["tgid"] = comm or instance << 12, tgid
        row["instance"], row["first_ns"], row["confirmed"] = instance, first_ns, 1
        row["identity"] = self._identity(instance)
        for field, value in identity.items():
            row["identity"][field] = value
        self.communicators.rows[key.tobytes()] = row

    def destroy(self, instance: int, at_ns: int) -> None:
        for row in self.communicators.rows.values():
            if row["instance"][0] == instance:
                row["destroyed_ns"] = at_ns

    def event(self, tgid: int, instance: int, kind: LifecycleKind, *, time_ns: int = 1, **fields: Any) -> None:
        """A lifecycle event waits; `fields` are those of LIFECYCLE_EVENT."""
        event = np.zeros(1, records.LIFECYCLE_EVENT)
        event["tgid"], event["instance"], event["kind"], event["time_ns"] = tgid, instance, int(kind), time_ns
        event["nranks"] = event["rank"] = -1
        for name, value in fields.items():
            event[name] = value
        self.lifecycle_events.waiting.append(event)

    def _identity(self, instance: int) -> Records:
        identity = np.zeros(1, records.IDENTITY)
        identity["comm_hash"], identity["nranks"], identity["n_nodes"], identity["local_ranks"] = instance, 2, 2, 1
        return identity

    def overflow(self, op: int, calls: int) -> None:
        self._overflow["calls"][op, 7] += calls

    def overflow_totals(self) -> Records:
        self._refuse()
        return self._overflow.copy()

    def enqueue_times(self) -> Records:
        self._refuse()
        return self._enqueue_times.copy()

    def processes_gone(self, pids: Collection[int]) -> None:
        pass

    def unreadable_calls(self) -> dict[int, int]:
        self._refuse()
        return {}

    def stats(self) -> dict[Stat, int]:
        self._refuse()
        return dict.fromkeys(Stat, 3)

    def _refuse(self) -> None:
        if self.refuses_totals:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
