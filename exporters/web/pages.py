"""Answers each path, without sockets: the metrics and the JSON pages.

A scrape of twenty thousand series is some 20 ms of work that holds Python's interpreter lock, and the samplers of the
agent live in the same process.  So one scrape is made at a time, and between pieces of a fraction of a millisecond
the lock is given up long enough for a waiting thread to take it.

Pages are of two kinds: health, readiness and the landing page cost nothing and are answered at once (`answer`); what
shows a snapshot is rendered (`page`, `render`), once for all who ask for the same.

`/communicators` shows which operations each rank's end of a communicator gave to NCCL: the series of a communicator
carry no op, because ranks times ops would be too many.  `/stalls` shows stalls in words, with their evidence: those
that go on, and those that ended lately.  `/queue-pairs` shows the queue pairs of RDMA devices, of which series tell how
many a process has.  `/transfers` shows by process and peer what libraries other than NCCL transfer, of which series
show the node's sums.  The first two tell whose the processes are and what they take: of a command line they
tell the program alone (probes/processes/owner.py), because scraping an agent need not reveal what jobs are given
as arguments.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, Protocol

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.hardware_evidence import (
    NO_HARDWARE_EVIDENCE,
    HardwareEvidence,
    NodeHardware,
    find_hardware_evidence,
)
from railscope.agent.facts.label_numbers import parse_number
from railscope.agent.facts.rank_process import RankProcess
from railscope.agent.facts.snapshot import RankPace, Snapshot
from railscope.agent.facts.stall import ProcessStack, Stall
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.earlier import EarlierTotals
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from railscope.exporters.series.lean import FULL, LEAN, PROFILES, LeanSeries
from railscope.exporters.series.printable_labels import PrintableLabels
from railscope.exporters.series.protobuf import Protobuf, ProtobufRenderer
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format, Renderer
from railscope.exporters.web.negotiation import accepts_gzip, metrics_format
from railscope.exporters.web.stall_documents import (
    ProcessDocument,
    SlowRankDocument,
    StackDocument,
    StallDocument,
    StallsDocument,
)
from railscope.probes.printable import printable_document
from railscope.probes.processes.owner import ProcessOwner, ProcessUsage
from railscope.probes.processes.processes import ProcessIdentity


def render_stalls(snapshot: Snapshot, processes: Iterable[RankProcess] = ()) -> bytes:
    """The page /stalls: `stalls` that go on, `ended` the last ones, `slow` ranks for which the others of this host wait
    in most operations though nothing hangs; times are nanoseconds since 1970, lengths seconds.

    Ranks are numbers, null where they are not known or no rank is blamed.  `process` holds what is known of the stalled
    rank's process: whose it is, and while it lives what it takes.
    """
    usages = {one.identity: one.usage for one in processes}
    hardware = NodeHardware(snapshot.condition, snapshot.rails, snapshot.gpus.devices)
    document: StallsDocument = {
        "simulated": snapshot.simulated,
        "stalls": [_describe_current(stall, snapshot, hardware, usages) for stall in snapshot.stalls.current],
        "ended": [
            describe_stall(stall, snapshot.monotonic_ns, hardware=find_hardware_evidence(hardware, stall))
            for stall in snapshot.stalls.ended
        ],
        "slow": [_describe_pace(one, snapshot) for one in snapshot.stalls.slow],
    }
    return json.dumps(printable_document(document), indent=1).encode() + b"\n"


def _describe_current(
    stall: Stall,
    snapshot: Snapshot,
    hardware: NodeHardware,
    usages: Mapping[ProcessIdentity, ProcessUsage | None],
) -> StallDocument:
    told = describe_stall(stall, snapshot.monotonic_ns, usages, find_hardware_evidence(hardware, stall))
    stack = _blamed_stack(stall, snapshot.stalls.stacks)
    if stack is not None:
        told["blamed_stack"] = stack
    return told


def describe_stall(
    stall: Stall,
    now_ns: int,
    usages: Mapping[ProcessIdentity, ProcessUsage | None] = MappingProxyType({}),
    hardware: HardwareEvidence = NO_HARDWARE_EVIDENCE,
) -> StallDocument:
    """A stall as `/stalls` and the socket of verdicts show it; `now_ns` is CLOCK_MONOTONIC.

    What of the hardware went wrong just before it comes first among the evidence, and what did since then last.
    """
    diagnosis, owner = stall.diagnosis, stall.owner
    told: StallDocument = {
        "comm": stall.comm,
        "rank": parse_number(stall.rank),
        "nranks": parse_number(stall.nranks),
        "pid": stall.pid,
        "process": _process(owner, usages.get(owner.identity) if owner is not None else None),
        "op": stall.op,
        "payload_bytes": stall.payload_bytes,
        "cause": diagnosis.cause,
        "strength": stall.strength,
        "since_realtime_ns": stall.since_realtime_ns,
        "flagged_realtime_ns": stall.flagged_realtime_ns,
        "ended_realtime_ns": stall.ended_realtime_ns,
        "seconds": stall.length_ns(now_ns) / 1e9,
        "blamed_rank": diagnosis.blamed_rank,
        "rail": diagnosis.rail,
        "device": diagnosis.device,
        "netns": diagnosis.netns,
        "evidence": [*hardware.first, *diagnosis.evidence, *hardware.last],
    }
    if stall.library:
        told["library"] = stall.library
        if stall.peer:
            told["peer"] = stall.peer
        if diagnosis.blamed_pid is not None:
            told["blamed_pid"] = diagnosis.blamed_pid
    return told


def _describe_pace(pace: RankPace, snapshot: Snapshot) -> SlowRankDocument:
    """A slow rank as `/stalls` shows it."""
    known = pace.slowness
    pids = (
        one.identity.pid for one in snapshot.collectives.communicators if one.identity.key == (pace.comm, pace.rank)
    )
    evidence = [
        f"the other ranks of this host wait for it for {pace.waited_ratio:.0%} of the time, "
        f"{pace.waited_seconds:.3g} s an operation",
        f"they did so in {known.waited} of {format_count(known.stretches, 'stretch', 'es')} of some seconds, with "
        f"{format_count(round(known.operations), 'operation')}",
    ]
    if pace.seen == "calls":
        evidence.append("seen by calls, which it makes last: whether its GPU is late is not known")
    return {
        "comm": pace.comm,
        "rank": parse_number(pace.rank),
        "pid": next(pids, None),
        "cause": Cause.RANK_SLOW,
        "strength": "weak" if pace.seen == "calls" else "strong",
        "since_realtime_ns": int(known.since * 1e9),
        "waited_ratio": pace.waited_ratio,
        "waited_seconds": pace.waited_seconds,
        "evidence": evidence,
    }


def _blamed_stack(stall: Stall, stacks: Mapping[tuple[str, int], ProcessStack]) -> StackDocument | None:
    """Where the Python code of the rank that a stall is put down to stands; None: it was not read."""
    blamed = stall.diagnosis.blamed_rank
    stack = stacks.get((stall.comm, blamed)) if blamed is not None else None
    if stack is None:
        return None
    told: StackDocument = {"taken_realtime_ns": stack.taken_ns + stall.realtime_offset_ns}
    if stack.why:
        told["unknown"] = stack.why
    else:
        told["lines"] = list(stack.lines)
    return told


def _process(owner: ProcessOwner | None, usage: ProcessUsage | None) -> ProcessDocument:
    """What is known of a process; what is not has no key."""
    known: ProcessDocument = {}
    if owner is not None and owner.user:
        known["user"] = owner.user
    if owner is not None and owner.program:
        known["program"] = owner.program
    if usage is not None:
        known["read_realtime_ns"] = usage.read_realtime_ns
        known["cpu_seconds"] = usage.cpu_seconds
        known["resident_bytes"] = usage.resident_bytes
        known["threads"] = usage.threads
        known["start_realtime_ns"] = usage.start_realtime_ns
    return known


def render_communicators(snapshot: Snapshot, processes: Iterable[RankProcess] = ()) -> bytes:
    """The page /communicators: calls and payload by operation since railscope first saw each; ended ones are left out.

    `processes` are those that map NCCL, by pid: what is known of whose they are and of what they take.

    Ranks are numbers, null where they are not known; so is `sequence`, the collectives that a rank entered since the
    communicator was made as NCCL numbers them.
    """
    document = {
        "simulated": snapshot.simulated,
        "communicators": [
            {
                "comm": one.identity.comm,
                "rank": parse_number(one.identity.rank),
                "nranks": parse_number(one.identity.nranks),
                "pid": one.identity.pid,
                "sequence": one.position,
                "ops": [{"op": op.op, "calls": op.calls, "payload_bytes": op.payload_bytes} for op in one.ops],
            }
            for one in snapshot.collectives.communicators
            if one.alive
        ],
        "processes": [{"pid": one.identity.pid, **_process(one.owner, one.usage)} for one in processes],
    }
    return json.dumps(printable_document(document), indent=1).encode() + b"\n"


def render_queue_pairs(snapshot: Snapshot, processes: Iterable[RankProcess] = ()) -> bytes:
    """The page /queue-pairs: each RDMA queue pair with its process and its other end, by which what switches count for
    flows can be joined; `counters` are those that somebody has bound to queue pairs (rdma-statistic(8)).

    `owners` are those that may own what it carries: one as a rule, several where its process maps several libraries.
    `read_realtime_ns` is when they were read, null where none were.  What the kernel does not tell is null.
    """
    del processes
    found, owners = snapshot.fabric.queue_pairs, snapshot.fabric.queue_pair_owners
    passed_ns = None if found.read_ns is None else snapshot.monotonic_ns - found.read_ns
    document = {
        "simulated": snapshot.simulated,
        "read_realtime_ns": None if passed_ns is None else snapshot.realtime_ns - passed_ns,
        "left_out": found.left_out,
        "queue_pairs": [
            {
                "device": one.device,
                "port": one.port,
                "number": one.number,
                "remote_number": one.remote_number,
                "remote_address": one.remote_address or None,
                "type": one.kind,
                "state": one.state,
                "pid": one.pid,
                "kernel_user": one.kernel_user or None,
                "owners": sorted(owner.value for owner in owners[one.device, one.number])
                if (one.device, one.number) in owners
                else None,
            }
            for one in found.queue_pairs
        ],
        "counters": [
            {
                "device": one.device,
                "port": one.port,
                "number": one.number,
                "queue_pairs": list(one.queue_pairs),
                "values": dict(one.counters),
            }
            for one in found.bound
        ],
    }
    return json.dumps(printable_document(document), indent=1).encode() + b"\n"


def render_transfers(snapshot: Snapshot, processes: Iterable[RankProcess] = ()) -> bytes:
    """The page /transfers: what each process did with each peer since railscope first saw it, and has under way.

    `peer` is as the library calls it, null for all those that have no name together; `payload_bytes` is null where
    arguments do not tell.  Durations are from the call to when its program learned that it is complete.
    """
    del processes
    known = snapshot.transfers
    told = {(one.library, one.op, one.pid, one.peer) for one in known.by_peer}
    in_flight: Counter[tuple[str, str, int, str]] = Counter()
    oldest_seconds: dict[tuple[str, str, int, str], float] = {}
    for waiting in known.under_way:
        pair = waiting.library, waiting.op, waiting.pid, waiting.peer
        if pair not in told:  # it is part of the sum of the others
            pair = *pair[:3], ""
        in_flight[pair] += waiting.count
        oldest_seconds[pair] = max(oldest_seconds.get(pair, 0.0), waiting.oldest_seconds)
    document = {
        "simulated": snapshot.simulated,
        "transfers": [
            {
                "library": one.library,
                "op": one.op,
                "direction": one.direction,
                "pid": one.pid,
                "peer": one.peer or None,
                "operations": one.operations,
                "payload_bytes": one.payload_bytes,
                "completed": one.completed,
                "failed": one.failed,
                "seconds": one.seconds,
                "in_flight": in_flight[one.library, one.op, one.pid, one.peer],
                "oldest_seconds": oldest_seconds.get((one.library, one.op, one.pid, one.peer), 0.0),
            }
            for one in known.by_peer
        ],
    }
    return json.dumps(printable_document(document), indent=1).encode() + b"\n"


Processes = Callable[[Collection[ProcessIdentity] | None], Iterable[RankProcess]]
"""Facts of the processes that are asked for; None: of all that map NCCL.  They take their time."""
Check = Callable[[], tuple[bool, str]]
"""Whether all is well, and one line that says so or says what is wrong."""

HEALTH_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"
STALLS_PATH: Final = "/stalls"
COMMUNICATORS_PATH: Final = "/communicators"
QUEUE_PAIRS_PATH: Final = "/queue-pairs"
TRANSFERS_PATH: Final = "/transfers"
LANDING_PATH: Final = "/"

_PLAIN: Final = "text/plain; charset=utf-8"
_WITHOUT_PAUSE_NS: Final = 500_000
_GZIP_ABOVE_BYTES: Final = 1024
_GZIP_LEVEL: Final = 1
_GZIP_WINDOW: Final = 31
"""zlib's largest window, 15, and 16 for a gzip header."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response without what only the connection knows."""

    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN
    headers: tuple[tuple[str, str], ...] = ()


def one_line_answer(status: HTTPStatus, line: str, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    """An HTTP answer of one line of text."""
    return Answer(status, f"{line}\n".encode(), headers=headers)


@dataclass(frozen=True, slots=True)
class Page:
    """A page that shows a snapshot, with all on which its bytes depend besides."""

    path: str
    format: Format | Protobuf | None = None
    """Of metrics; None: a page of JSON."""
    gzip: bool = False
    """The client takes gzip."""
    profile: str = FULL
    """Of metrics: which series are shown, of exporters.series.lean.PROFILES."""


class ShownTotals(Protocol):
    """Totals that do not fall when the agent is replaced (agent/node/daemon/kept_totals.py)."""

    @property
    def earlier(self) -> EarlierTotals: ...

    def keep(self, snapshot: Snapshot, shown: Iterable[Family]) -> None: ...


class Pages:
    """The pages of one agent.  `answer`, `page` and `render` may be called from several threads."""

    def __init__(
        self,
        *,
        telemetry_path: str,
        snapshot: Callable[[], Snapshot],
        processes: Processes,
        healthy: Check,
        ready: Check,
        budget: SeriesBudget,
        selection: Selection,
        profile: Callable[[], str] = lambda: FULL,
        kept: ShownTotals | None = None,
    ) -> None:
        """`profile`: of scrapes that do not choose one.  `kept`: what earlier agents counted, and where totals are
        saved before they are shown; None: nowhere."""
        self._telemetry_path = telemetry_path
        self._snapshot = snapshot
        self._processes = processes
        self._checks = {HEALTH_PATH: healthy, READY_PATH: ready}
        self._budget = budget
        self._selection = selection
        self._profile = profile
        self._lean = LeanSeries()
        self._kept = kept
        self._printable = PrintableLabels()
        self._text = Renderer()
        self._protobuf = ProtobufRenderer()
        self._scrape = threading.Lock()

    def page(self, path: str, query: str = "", *, accept: str = "", accept_encoding: str = "") -> Page | None:
        """Which rendered page is at `path`; None: none, `answer` has what is there."""
        if path == self._telemetry_path:
            chosen = next((one for one in PROFILES if f"profile={one}" in query.split("&")), None)
            return Page(path, metrics_format(accept), accepts_gzip(accept_encoding), chosen or self._profile())
        return Page(path) if path in (STALLS_PATH, COMMUNICATORS_PATH, QUEUE_PAIRS_PATH, TRANSFERS_PATH) else None

    def answer(self, path: str) -> Answer:
        """What is at a path that has no rendered page; takes no lock.  What a check raises goes through."""
        if path in self._checks:
            good, line = self._checks[path]()
            return one_line_answer(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, line)
        if path == LANDING_PATH:
            return Answer(HTTPStatus.OK, self._landing(), "text/html; charset=utf-8")
        return one_line_answer(
            HTTPStatus.NOT_FOUND, f"nothing here; metrics are at {self._telemetry_path}, all pages at {LANDING_PATH}"
        )

    def render(self, page: Page) -> Answer:
        """Render a page of now; takes a snapshot.  What the snapshot raises goes through to the caller."""
        if page.format is not None:
            return self._metrics(page.format, gzip=page.gzip, profile=page.profile)
        if page.path == STALLS_PATH:
            snapshot = self._snapshot_alone()
            stalled = {stall.owner.identity for stall in snapshot.stalls.current if stall.owner is not None}
            return self._json(render_stalls, snapshot, stalled)
        if page.path == QUEUE_PAIRS_PATH:
            return self._json(render_queue_pairs, self._snapshot_alone(), ())
        if page.path == TRANSFERS_PATH:
            return self._json(render_transfers, self._snapshot_alone(), ())
        return self._json(render_communicators, self._snapshot_alone(), None)

    def _snapshot_alone(self) -> Snapshot:
        with self._scrape:
            return self._snapshot()

    def _json(
        self,
        render: Callable[[Snapshot, Iterable[RankProcess]], bytes],
        snapshot: Snapshot,
        wanted: Collection[ProcessIdentity] | None,
    ) -> Answer:
        """A page that scrapes do not wait for, neither while processes are read nor while it is written down."""
        processes = self._processes(wanted) if wanted is None or wanted else ()
        return Answer(HTTPStatus.OK, render(snapshot, processes), "application/json")

    def _metrics(self, format: Format | Protobuf, *, gzip: bool, profile: str) -> Answer:
        with self._scrape:
            pieces = self._pieces(self._snapshot(), format, profile)
        size = sum(map(len, pieces))
        headers = [("Vary", "Accept, Accept-Encoding")]
        if size > _GZIP_ABOVE_BYTES and gzip:
            headers.append(("Content-Encoding", "gzip"))
            # zlib does not hold the interpreter lock while it compresses.
            packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
            pieces = [*map(packer.compress, pieces), packer.flush()]
        return Answer(HTTPStatus.OK, b"".join(pieces), format.content_type, tuple(headers))

    def _pieces(self, snapshot: Snapshot, format: Format | Protobuf, profile: str) -> list[bytes]:
        """The exposition of a snapshot."""
        pieces = []
        pause = _Pauses()
        # All of it in one block: a collector that comes back while the families live walks them all at once.
        with _without_collector():
            shown = self._families(snapshot, self._budget, pause)
            if profile == LEAN:
                shown = self._lean.select(shown, snapshot)
            chunks = self._text.chunks(shown, format) if isinstance(format, Format) else self._protobuf.chunks(shown)
            for piece in chunks:
                pieces.append(piece)
                pause()
            del shown, chunks
        return pieces

    def give_families(self, take: Callable[[Family], object]) -> Snapshot:
        """Give each family of a scrape that chooses no profile to `take`, for who sends them in another form.

        `take` is called while no scrape is made, and in between the interpreter lock is given up.  Returns the snapshot
        that the families are of.
        """
        pause = _Pauses()
        with self._scrape:
            snapshot = self._snapshot()
            with _without_collector():
                shown = self._families(snapshot, self._budget, pause)
                if self._profile() == LEAN:
                    shown = self._lean.select(shown, snapshot)
                for family in shown:
                    take(family)
                    pause()
                del shown
        return snapshot

    def keep_totals(self, snapshot: Callable[[], Snapshot]) -> None:
        """Save the totals without showing them: all of them, whatever the budget would leave out."""
        with self._scrape:
            taken = snapshot()
            with _without_collector():
                self._families(taken, SeriesBudget(sys.maxsize, self._budget.dropped_total), _Pauses())

    def _families(self, snapshot: Snapshot, budget: SeriesBudget, pause: Callable[[], None]) -> tuple[Family, ...]:
        kept = self._kept
        earlier = kept.earlier if kept is not None else None
        shown = make_families(snapshot, budget, pause, self._selection, earlier, self._printable)
        if kept is not None:
            kept.keep(snapshot, shown)
        return shown

    def _landing(self) -> bytes:
        import html  # for people only: its table of all characters with names is not small

        links = "".join(
            f'<li><a href="{html.escape(path)}">{html.escape(path)}</a> {meaning}</li>\n'
            for path, meaning in (
                (
                    self._telemetry_path,
                    "metrics for Prometheus, all (?profile=full) or few (?profile=lean)",
                ),
                (STALLS_PATH, "stalled collectives with their causes, as JSON"),
                (COMMUNICATORS_PATH, "which operations each rank's communicator called, as JSON"),
                (TRANSFERS_PATH, "what libraries other than NCCL transfer, by process and peer, as JSON"),
                (QUEUE_PAIRS_PATH, "RDMA queue pairs with their processes and other ends, as JSON"),
                (HEALTH_PATH, "whether the agent works (liveness)"),
                (READY_PATH, "whether the agent has its first readings (readiness)"),
            )
        )
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head><title>railscope</title></head>\n<body>\n<h1>railscope</h1>\n'
            "<p>NCCL collectives of this node and the bytes that they put on each rail.</p>\n"
            f"<ul>\n{links}</ul>\n</body>\n</html>\n"
        ).encode()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector of cycles does not run in the block: for one thread at a time.

    Twenty thousand series are forty thousand tuples that live until they are written down.  The collector would walk
    them some sixty times and find no cycle: a tenth of the scrape, while every other thread waits.
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


class _Pauses:
    """Release the interpreter lock for an instant, but not more often than others can need it.

    Without it a waiting thread gets the lock after 5 ms at the earliest; and giving it up costs as much as fifty
    series.
    """

    def __init__(self) -> None:
        self._next_ns = time.monotonic_ns() + _WITHOUT_PAUSE_NS

    def __call__(self) -> None:
        if time.monotonic_ns() >= self._next_ns:
            time.sleep(0)
            self._next_ns = time.monotonic_ns() + _WITHOUT_PAUSE_NS
