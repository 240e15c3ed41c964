"""A made-up fleet for tests of the monitoring stack: simulated agents that serve hand-written metrics.

Nothing here was measured.  A fleet is some hosts with a rank and two rails each; its communicator makes ten operations
a second until it is told to stall.  One server has all hosts, each under a path of its own, so that a scrape
configuration can give each an `instance` of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Final

from tests.serving import QuietHandler, running

OPERATIONS_PER_SECOND: Final = 10
RAIL_BYTES_PER_SECOND: Final = 100_000_000
SPEED: Final = 1_250_000_000


@dataclass
class SimulatedFleet:
    """Hosts `NAME0`, `NAME1`, …, each with one rank and two rails."""

    name: str
    hosts: int = 2
    stalled_at: float | None = None
    """When operations stopped, seconds since the Unix epoch."""
    behind: int | None = None
    """The rank that did not enter the last operation."""
    causes: dict[int, str] = field(default_factory=dict)
    """What each host says of its rank: labels of `comm_stall_info` after rank and cause, as `cause;more labels`."""
    rails_down: set[tuple[int, int]] = field(default_factory=set)
    """(host, rail)."""
    writing: int | None = None
    """The rank whose process writes to storage."""
    silent: set[int] = field(default_factory=set)
    """Hosts whose agent does not answer."""
    lossy: set[tuple[int, int]] = field(default_factory=set)
    slow: set[tuple[int, int]] = field(default_factory=set)
    restarted: dict[int, int] = field(default_factory=dict)
    """Operations that were entered when a host's agent was started anew, by host: it counts from there."""
    began: float = field(default_factory=time.time)

    @property
    def comm(self) -> str:
        return f"{sum(ord(letter) << (8 * at) for at, letter in enumerate(self.name)):016x}"

    def stall(self, **causes: str) -> None:
        """Operations stop now, if they have not yet; `rank0="process_stopped"` and so on is what the hosts say."""
        self.causes = {int(rank.removeprefix("rank")): cause for rank, cause in causes.items()}
        self.stalled_at = self.stalled_at or time.time()

    def restart_agent(self, host: int) -> None:
        """The agent of a host is started anew beside the job, now."""
        self.restarted[host] = int((time.time() - self.began) * OPERATIONS_PER_SECOND)

    def recover(self) -> None:
        """Go on with the operation after the one that the others had entered: counters never fall."""
        if self.stalled_at is not None:
            self.began += time.time() - self.stalled_at - 1 / OPERATIONS_PER_SECOND
        self.stalled_at, self.behind, self.writing, self.causes = None, None, None, {}
        self.rails_down.clear()
        self.lossy.clear()
        self.slow.clear()

    def text(self, host: int) -> str:
        now = time.time()
        moving = (self.stalled_at or now) - self.began
        completed = int(moving * OPERATIONS_PER_SECOND)
        late = self.behind == host
        entered = completed + (self.stalled_at is not None and not late)
        before = self.restarted.get(host, 0)
        stalled = self.stalled_at is not None and host in self.causes
        waits = now - self.stalled_at if self.stalled_at is not None and not late else 0
        comm = f'comm="{self.comm}",rank="{host}"'
        lines = [
            'railscope_build_info{version="0",kernel="0",simulated="true"} 1',
            f"railscope_snapshot_timestamp_seconds {now:.3f}",
            "railscope_processes_observed 1",
            f"railscope_agent_start_time_seconds {self.began + before / OPERATIONS_PER_SECOND:.3f}",
            f'railscope_comm_info{{{comm},nranks="{self.hosts}",gpu="0",pid="{4000 + host}",netns=""}} 1',
            f"railscope_comm_enqueued_total{{{comm}}} {entered - before}",
            f"railscope_comm_completed_total{{{comm}}} {completed - before}",
            f"railscope_comm_counted_from_start{{{comm}}} {0 if before else 1}",
            f"railscope_comm_inflight_seconds{{{comm}}} {waits:.3f}",
            'railscope_collector_success{collector="netdev"} 1',
            'railscope_events_lost_total{reason="ring"} 0',
            'railscope_probe_attached{library="libnccl.so.2",nccl_version="2.32.3",program="enqueue"} 1',
        ]
        if self.writing == host:
            lines.append(f"railscope_comm_writing{{{comm}}} 1")
        if stalled:
            cause, _, more = self.causes[host].partition(";")
            details = {"strength": "strong", "blamed_rank": "", "rail": "", "device": "", "netns": ""}
            details |= dict(pair.split("=") for pair in more.split(",") if pair)
            labels = ",".join(f'{name}="{value}"' for name, value in details.items())
            lines += [
                f'railscope_comm_stalled{{{comm},op="AllReduce",cause="{cause}"}} 1',
                f'railscope_comm_stall_info{{{comm},cause="{cause}",{labels}}} 1',
                f'railscope_comm_stall_seconds_total{{{comm},cause="{cause}"}} {waits:.3f}',
            ]
        for rail in range(2):
            lines += self._rail(host, rail, moving)
        return "\n".join(lines) + "\n"

    def _rail(self, host: int, rail: int, moving: float) -> Sequence[str]:
        down, lossy, slow = ((host, rail) in which for which in (self.rails_down, self.lossy, self.slow))
        labels = f'rail="{rail}",device="eth{rail}"'
        sent = int(moving * RAIL_BYTES_PER_SECOND)
        return [
            f'railscope_rail_info{{{labels},port="1",netdev="eth{rail}",pci="",gpu="0",numa="0",link_layer="Ethernet",'
            'driver="simulated"} 1',
            f'railscope_rail_up{{{labels},port="1"}} {0 if down else 1}',
            f'railscope_rail_speed_bytes_per_second{{{labels},port="1"}} {SPEED}',
            f'railscope_rail_transmit_bytes_total{{{labels},port="1"}} {sent}',
            f'railscope_rail_receive_bytes_total{{{labels},port="1"}} {sent}',
            f"railscope_rail_queue_backlog_bytes{{{labels}}} {200_000 if slow else 0}",
            f'railscope_rail_tcp_round_trip_seconds{{{labels},stat="mean"}} {0.05 if slow else 0.0002}',
            f"railscope_rail_tcp_sent_bytes_total{{{labels}}} {sent}",
            f"railscope_rail_tcp_retransmitted_bytes_total{{{labels}}} {sent // 20 if lossy else 0}",
        ]


class _Handler(QuietHandler):
    server: _Server

    def do_GET(self) -> None:
        name, _, host = self.path.strip("/").partition("/")
        fleet = next((one for one in self.server.fleets if one.name == name), None)
        silent = fleet is None or int(host) in fleet.silent
        body = b"" if fleet is None or silent else fleet.text(int(host)).encode()
        self.answer(503 if silent else 200, "text/plain; version=0.0.4", body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # all hosts are scraped at once
    fleets: Sequence[SimulatedFleet] = ()


@contextmanager
def served(fleets: Sequence[SimulatedFleet]) -> Iterator[str]:
    """Serve these fleets; yields the scrape configurations of a Prometheus, in YAML."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.fleets = fleets
    targets = "\n".join(
        f"      - targets: ['127.0.0.1:{server.server_port}']\n"
        f"        labels: {{instance: '{fleet.name}{host}:9779', __metrics_path__: '/{fleet.name}/{host}'}}"
        for fleet in fleets
        for host in range(fleet.hosts)
    )
    with running(server):
        yield f"scrape_configs:\n  - job_name: railscope\n    static_configs:\n{targets}\n"
