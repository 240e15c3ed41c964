"""Simulated agents: hosts that serve what the exporter makes of a made-up snapshot, with counters that rise.

Nothing here was measured.  The exposition is the real renderer's; every counter rises steadily.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.snapshot import CommunicatorFacts, Snapshot
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format, Renderer
from tests.serving import QuietHandler, running
from tests.unit.exporters_snapshots import communicator, full_snapshot, rail, with_communicators

HOSTS: Final = ("gpu-a:9779", "gpu-b:9779")
"""The first is as agents are; the others are asked for every detail (--series.detail=all)."""
DETAILED_PATH: Final = "/detailed"
COUNTED_PER_SECOND: Final = 3_000_000
"""By every counter; at a threshold of some rule, stores would differ by how they extrapolate rates."""
_COMPARED: Final = frozenset({"railscope_comm_enqueued_total", "railscope_comm_completed_total"})
_STEP_SECONDS: Final = 4
"""Ranks' positions are compared between hosts: they stand still for some scrapes, as what a store finds would hang on
which host it scraped last.  A rule that is evaluated between the scrapes of two hosts still sees one of them a
step ahead, for a second: who counts series lets ranks stand still."""


def snapshot() -> Snapshot:
    """Something of everything, a rail that is down, a rank that left and counters of every severity among it."""
    full = full_snapshot()
    counters = (
        ("link_downed", "page", 1),
        ("packet_seq_err", "warn", 42),
        ("np_cnp_sent", "context", 7),
        ("rx_packets", "context", 7),
    )
    first, *others = full.rails
    rails = (replace(first, counters=counters), *others, replace(rail("2", "mlx5_2"), counters=counters, up=False))
    left = replace(communicator(rank="2", pid=4713), alive=False)
    known = with_communicators(full, *map(_in_a_pod, (*full.collectives.communicators, left)))
    return replace(known, rails=rails, realtime_ns=time.time_ns())


def _in_a_pod(known: CommunicatorFacts) -> CommunicatorFacts:
    """The rank, in a pod if it has a job."""
    if not any(label == "job" for label, _ in known.identity.job):
        return known
    pod = (("namespace", "ml"), ("pod", "train-0"), ("pod_uid", "0b1c2d3e-1111-2222-3333-444455556666"))
    return replace(known, identity=replace(known.identity, job=(*known.identity.job, *pod)))


def risen(family: Family, seconds: float, *, stepping: bool = True) -> Family:
    """The family after some time in which every counter rose, ranks' positions only if they are `stepping`."""
    if family.metric.name in _COMPARED:
        seconds = seconds // _STEP_SECONDS * _STEP_SECONDS if stepping else 0.0
    more = int(seconds * COUNTED_PER_SECOND)
    histograms = tuple(
        (
            labels,
            replace(
                one,
                counts=tuple(count + int(seconds * 10) for count in one.counts),
                sum=None if one.sum is None else one.sum + seconds,
            ),
        )
        for labels, one in family.histograms
    )
    if family.metric.kind != "counter":
        return replace(family, histograms=histograms)
    return replace(family, samples=tuple((labels, value + more) for labels, value in family.samples))


class _Handler(QuietHandler):
    server: _Server

    def do_GET(self) -> None:
        seconds = time.monotonic() - self.server.began
        selection = Selection(["all"] if self.path == DETAILED_PATH else [])
        found = make_families(self.server.snapshot(), selection=selection)
        passed = {
            # The ranks of one host wait in operations for half the time: the others wait for them.
            catalogue.COMM_OPERATION_SECONDS: seconds if self.path == DETAILED_PATH else seconds / 2,
            # A rail that sends much again is lossy, and compared with none.
            catalogue.RAIL_TCP_RETRANSMITTED_BYTES: seconds / 1000,
        }
        shown = [risen(one, passed.get(one.metric, seconds), stepping=self.server.stepping) for one in found]
        body = Renderer().render(shown, Format.PROMETHEUS)
        self.answer(200, Format.PROMETHEUS.content_type, body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, taken: Callable[[], Snapshot], *, stepping: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.snapshot, self.began, self.stepping = taken, time.monotonic(), stepping


@contextmanager
def served(
    taken: Callable[[], Snapshot] = snapshot, hosts: Sequence[str] = HOSTS, *, stepping: bool = True
) -> Iterator[str]:
    """Serve the metrics, with more detail for all hosts but the first; yields the scrape configuration.

    `stepping` False: ranks' positions stand still, for who counts series.
    """
    server = _Server(taken, stepping=stepping)
    targets = "".join(
        f"      - targets: ['127.0.0.1:{server.server_port}']\n"
        f"        labels: {{instance: '{host}', __metrics_path__: '{DETAILED_PATH if at else '/metrics'}'}}\n"
        for at, host in enumerate(hosts)
    )
    with running(server):
        yield f"scrape_configs:\n  - job_name: railscope\n    static_configs:\n{targets}"
