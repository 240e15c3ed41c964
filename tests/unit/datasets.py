"""Small recorded datasets (simulated), as `railscope record` would write them of several servers.

    job = JobDataset(tmp_path, servers=(2, 2))       # two servers of two GPUs
    job.communicator("aa", (0, 1, 2, 3))             # GPUs by rank
    job.collective("aa", "AllReduce", 1 << 20)       # every rank calls once
    dataset = job.open()

Nothing is written before `write` or `open`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final

import ibis

from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.model.mapping import Mapping as RankMapping
from railscope.agent.model.shape import Mode, Shape
from railscope.agent.model.volumes import stage_volumes

BEGAN_NS: Final = 1_790_000_000_000_000_000
"""When every such recording begins: 2026-09-21, time of day."""
SECOND_NS: Final = 1_000_000_000

Row = dict[str, Any]


@dataclass(slots=True)
class JobDataset:
    """A job whose recording is made up row by row."""

    folder: Path
    servers: Sequence[int] = (2, 2)
    """GPUs of each server; they are numbered through, and the servers are called node-0, node-1, …"""
    world_ranks: bool = False
    """Whether the launcher said each process's rank."""
    silent_servers: frozenset[int] = frozenset()
    """Servers that were not recorded."""
    recording: Row = field(default_factory=dict)
    """Columns of `recordings` that differ from the usual."""
    shuffle: int | None = None
    """Write rows in an order drawn with this seed."""
    _rows: dict[tuple[int, str], list[Row]] = field(default_factory=dict)
    _ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _instances: dict[tuple[str, int], int] = field(default_factory=dict)
    _sequence: dict[tuple[str, int], Iterator[int]] = field(default_factory=dict)
    _now_ns: int = BEGAN_NS

    def server_of(self, gpu: int) -> int:
        for server, size in enumerate(self.servers):
            if gpu < size:
                return server
            gpu -= size
        raise IndexError(gpu)

    def local_index(self, gpu: int) -> int:
        return gpu - sum(self.servers[: self.server_of(gpu)])

    def communicator(self, comm: str, gpus: Sequence[int], /, group_name: str | None = None, **columns: Any) -> None:
        """A communicator of these GPUs, by rank; more columns as in the schema, `comm` too: what it is recorded as."""
        self._ranks[comm] = tuple(gpus)
        nodes = list(dict.fromkeys(self.server_of(gpu) for gpu in gpus))
        for rank, gpu in enumerate(gpus):
            server = self.server_of(gpu)
            instance = self._instances.setdefault((comm, rank), len(self._instances) + 1)
            self._add(
                server,
                "communicators",
                {
                    "instance": instance,
                    "comm": comm,
                    "rank": rank,
                    "nranks": len(gpus),
                    "local_ranks": sum(self.server_of(other) == server for other in gpus),
                    "node_rank": nodes.index(server),
                    "pid": 1000 + gpu,
                    "gpu": str(self.local_index(gpu)),
                    "world_rank": gpu if self.world_ranks else None,
                    "group_name": group_name,
                }
                | columns,
            )

    def call(
        self,
        comm: str,
        rank: int,
        op: str,
        payload_bytes: int | None,
        *,
        data_type: str | None = "Float16",
        peer: int | None = None,
        time_ns: int | None = None,
        times: int = 1,
    ) -> None:
        """One rank calls so often; without a time, a microsecond after the last call of the job."""
        sequence = self._sequence.setdefault((comm, rank), count())
        for _ in range(times):
            self._now_ns += 1000
            self._of_rank(
                comm,
                rank,
                "calls",
                {
                    "time_ns": self._now_ns if time_ns is None else time_ns,
                    "tid": 1,
                    "stream": 1,
                    "op": op,
                    "data_type": data_type,
                    "payload_bytes": payload_bytes,
                    "peer": peer,
                    "sequence": next(sequence),
                },
            )

    def collective(self, comm: str, op: str, payload_bytes: int, **columns: Any) -> None:
        """Every rank calls; `columns` as of `call`."""
        for rank in range(len(self._ranks[comm])):
            self.call(comm, rank, op, payload_bytes, **columns)

    def operation(
        self,
        comm: str,
        rank: int,
        op: str,
        payload_bytes: int | None,
        begin_ns: int,
        took_ns: int,
        **columns: Any,
    ) -> None:
        """An operation that took its time; `begin_ns` counts from the recording's beginning."""
        self._of_rank(
            comm,
            rank,
            "operations",
            {
                "begin_ns": BEGAN_NS + begin_ns,
                "end_ns": BEGAN_NS + begin_ns + took_ns,
                "op": op,
                "data_type": "Float16",
                "payload_bytes": payload_bytes,
                "stream": 1,
                "source": "proxy",
            }
            | columns,
        )

    def compute(self, gpu: int, begin_ns: int, took_ns: int, name: str = "gemm", stream: int = 7) -> None:
        """A kernel; `begin_ns` counts from the recording's beginning."""
        begin_ns += BEGAN_NS
        row = {"pid": 1000 + gpu, "stream": stream, "begin_ns": begin_ns, "end_ns": begin_ns + took_ns, "name": name}
        self._add(self.server_of(gpu), "compute", row)

    def connection(self, comm: str, rank: int, peer: int, channel: int = 0, *, net_device: int | None = 0) -> None:
        """A connection over the network: this rank sends, the peer receives."""
        for own, other, send in ((rank, peer, True), (peer, rank, False)):
            row = {"peer": other, "channel": channel, "send": send, "network": "IB", "net_device": net_device}
            self._of_rank(comm, own, "connections", row)

    def row(self, server: int, table: str, **columns: Any) -> None:
        """Any row, as the schema has it."""
        self._add(server, table, columns)

    def write(self) -> Path:
        """Write everything; returns the folder."""
        for server in range(len(self.servers)):
            if server in self.silent_servers:
                continue
            writer = DatasetWriter(self.folder, f"node-{server}")
            writer.add_rows("recordings", [self._recording(server)], BEGAN_NS)
            for (owner, table), rows in self._rows.items():
                if owner == server:
                    if self.shuffle is not None:
                        rows = random.Random(self.shuffle).sample(rows, len(rows))
                    writer.add_rows(table, rows, BEGAN_NS)
        return self.folder

    def open(self, backend: Any = None) -> Dataset:
        """Write everything, and read it as the analyses do."""
        return open_dataset([self.write()], _engine() if backend is None else backend)

    def _recording(self, server: int) -> Row:
        usual = {
            "schema_version": 1,
            "source": "railscope",
            "railscope": "0.0",
            "simulated": True,
            "began_ns": BEGAN_NS,
            "ended_ns": max([BEGAN_NS + SECOND_NS, self._now_ns, *self._times()]),
            "clock_error_ns": 0,
            "calls_lost": 0,
            "operations_lost": 0,
            "lines_skipped": 0,
            "compute_recorded": (server, "compute") in self._rows,
        }
        return usual | self.recording

    def _times(self) -> Iterable[int]:
        """Of all servers: their recordings end together."""
        for (_, table), rows in self._rows.items():
            if table in ("calls", "operations", "compute"):
                yield from (row.get("end_ns", row.get("time_ns")) or BEGAN_NS for row in rows)

    def _of_rank(self, comm: str, rank: int, table: str, row: Row) -> None:
        server = self.server_of(self._ranks[comm][rank])
        self._add(server, table, {"instance": self._instances[comm, rank], **row})

    def _add(self, server: int, table: str, row: Row) -> None:
        self._rows.setdefault((server, table), []).append(row)


def gpt_job(
    folder: Path, shape: Shape, mapping: RankMapping, gpus_per_server: int, iterations: int = 1, **columns: Any
) -> JobDataset:
    """A GPT-shaped job that makes exactly the calls that `railscope estimate --exact` counts, in a plausible order.

    Communicators are called tp…, dp…, pp… and emb…, as one communicator each of the tensor ranks, the replicas, the
    stages of a pipeline, and its first and last stage.
    """
    servers = (gpus_per_server,) * (shape.ranks // gpus_per_server)
    job = JobDataset(folder, servers, **columns)
    ranks = mapping.ranks
    job.communicator("world", range(shape.ranks))
    groups: Mapping[str, Sequence[Sequence[int]]] = {
        "tp": ranks.reshape(-1, shape.tensor).tolist() if shape.tensor > 1 else [],
        "dp": ranks.transpose(0, 2, 1).reshape(-1, shape.data).tolist() if shape.data > 1 else [],
        "pp": ranks.transpose(1, 2, 0).reshape(-1, shape.pipeline).tolist() if shape.pipeline > 1 else [],
        "emb": ranks[[0, -1]].transpose(1, 2, 0).reshape(-1, 2).tolist() if shape.pipeline > 1 else [],
    }
    for kind, members in groups.items():
        for number, gpus in enumerate(members):
            job.communicator(f"{kind}{number}", gpus)
    stage_of = {int(ranks[stage, data, tensor]): stage for stage, data, tensor in _places(shape)}
    volumes = [stage_volumes(shape, Mode.EXACT, stage) for stage in range(shape.pipeline)]
    for _iteration in range(iterations):
        for _ in range(shape.micro_batches):
            for number, gpus in enumerate(groups["tp"]):
                volume = volumes[stage_of[gpus[0]]].tp
                each = int(volume.messages) // shape.micro_batches
                job.collective(f"tp{number}", "AllReduce", volume.message_bytes, times=each)
            for number in range(len(groups["pp"])):
                for stage in range(shape.pipeline - 1):
                    for source, destination in ((stage, stage + 1), (stage + 1, stage)):
                        size = shape.activation_bytes
                        job.call(f"pp{number}", source, "Send", size, peer=destination)
                        job.call(f"pp{number}", destination, "Recv", size, peer=source)
        for number, gpus in enumerate(groups["dp"]):
            job.collective(f"dp{number}", "AllReduce", volumes[stage_of[gpus[0]]].dp.message_bytes)
        for number in range(len(groups["emb"])):
            job.collective(f"emb{number}", "AllReduce", volumes[0].embedding_sync.message_bytes)
        job._now_ns += SECOND_NS
    return job


@cache
def _engine() -> Any:
    """One DuckDB for all tests: each of its own costs a tenth of a second."""
    return ibis.duckdb.connect(threads=1)


def _places(shape: Shape) -> Iterator[tuple[int, int, int]]:
    for stage in range(shape.pipeline):
        for data in range(shape.data):
            for tensor in range(shape.tensor):
                yield stage, data, tensor
