"""Parses one scrape of an agent into typed facts of its node.

Counters stand here as they were scraped: what happened between two scrapes is `node_view`'s question.  What the agent
does not know, or a version of it does not show, is None or absent here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from railscope.agent.facts import catalogue
from railscope.agent.facts.hardware import ALL_LINKS
from railscope.agent.facts.rank_identity import RankIdentity, RankKey, rank_identity_from_labels
from railscope.exporters.top.exposition import ScrapedSample, parse_samples
from railscope.exporters.top.transfers import ScrapedTransfer, TransferKey, parse_transfers

RailKey = tuple[str, str, str]
"""rail, device, network namespace (empty: the agent's own)."""

NvlinkKey = tuple[str, str]
"""GPU, link."""

Number = TypeVar("Number", int, float)

_OF_RANK: Final = frozenset(catalogue.COMM_INFO.labels)
"""The other labels of that series are facts of the job."""
_FACT_OF: Final = {catalogue.EXPORTED_JOB: "job"}
_CONTEXT: Final = "context"
"""Severity of the counters that are no errors."""


class ScrapeError(Exception):
    """What was answered is not what an agent answers; the message is one line."""


@dataclass(frozen=True, slots=True)
class OpCounts:
    """Calls and payload of one kind of operation."""

    calls: float
    payload_bytes: float | None


@dataclass(frozen=True, slots=True)
class CompletedCounts:
    """Operations of one kind that completed, all sizes: sums."""

    payload_bytes: float
    bus_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ScrapedRank:
    """What one rank's end of a communicator did, as its series tell."""

    identity: RankIdentity
    enqueued: float | None
    late: bool
    """Whether the agent came after its first call, so that `enqueued` compares with no other rank's."""
    estimated: float | None
    """Of those that were enqueued, such as met no probe."""
    sequence: float | None
    """Collectives by NCCL's own numbers, which compare all the same."""
    completed: float | None
    replayed: float | None
    """Collectives that replays of CUDA graphs ran: no call was made for them."""
    inflight_seconds: float | None
    operations: float | None
    operation_seconds: float | None
    arrival_lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class ScrapedProcess:
    """A process that maps NCCL; None and empty: the agent does not know, or does not tell."""

    user: str = ""
    program: str = ""
    """Without arguments."""
    start_realtime_ns: int | None = None
    read_realtime_ns: int | None = None
    """When the agent read the following, by its own clock."""
    cpu_seconds: float | None = None
    resident_bytes: int | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class ScrapedRail:
    """What one network port did until a scrape, by the series of its rail."""

    rail: str
    device: str
    netns: str
    up: bool | None
    speed_bytes_per_second: float | None
    transmit_bytes: float | None
    receive_bytes: float | None
    transmit_explained_ratio: float | None
    receive_explained_ratio: float | None
    errors: Mapping[str, float]
    """What the device counts that is no mere context, by the counter's name; its queue's drops too."""
    bytes_by_owner: Mapping[str, float] = field(default_factory=dict)
    """Sent and received; empty: not told."""
    transmit_expected_bytes: float | None = None
    """That observed collectives should have put on it; None: not known, or not told."""
    receive_expected_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class ScrapedJob:
    """The steps of a job until a scrape, by the rank that stands for it."""

    job: str
    """As its batch system or launcher calls it; empty: not known."""
    steps: float
    """Those that `seconds` has."""
    seconds: float
    parts: Mapping[str, float]
    """Seconds by what they were spent on."""


@dataclass(frozen=True, slots=True)
class ScrapedNvlink:
    """One NVLink of one GPU."""

    gpu: str
    link: str
    """`all`: what the GPU tells of its links only together."""
    up: bool | None
    transmit_bytes: float | None
    receive_bytes: float | None
    errors: Mapping[str, float]
    """By kind, those that there were."""

    @property
    def single(self) -> bool:
        """Whether it is one link, and not all of them together."""
        return self.link != ALL_LINKS


@dataclass(frozen=True, slots=True)
class ScrapedStall:
    """One stall, as `/stalls` reports it.

    Not the node's Stall: an agent of another version may report causes that are not known here.  It holds no
    RankIdentity: `/stalls` tells a part of one, also of a communicator that the metrics do not show any more.
    """

    comm: str
    rank: str
    nranks: str
    op: str
    cause: str
    strength: str
    pid: str
    process: ScrapedProcess
    seconds: float
    ended_seconds_ago: float | None
    """None: it goes on."""
    blamed_rank: str
    """Empty: none is blamed."""
    rail: str
    device: str
    netns: str
    evidence: tuple[str, ...]
    library: str = ""
    """Whose transfer it is; empty: NCCL's."""
    peer: str = ""
    """Of a transfer: its other end; empty: not known."""
    blamed_pid: str = ""
    """Of a transfer: the process at its other end that is to blame; empty: none of the host."""


@dataclass(frozen=True, slots=True)
class NodeScrape:
    """One node at one moment."""

    at_seconds: float
    """When the agent put it together, since the Unix epoch by its own clock."""
    version: str
    simulated: bool
    processes: int | None
    ranks: Mapping[RankKey, ScrapedRank]
    jobs: Mapping[RankKey, ScrapedJob]
    """By the rank that stands for the job."""
    rails: Mapping[RailKey, ScrapedRail]
    nvlinks: Mapping[NvlinkKey, ScrapedNvlink]
    gpu_names: Mapping[str, str]
    nvlink_speeds: Mapping[str, float]
    """Of all NVLinks of a GPU together, bytes per second of one direction."""
    gpu_complaints: Mapping[str, tuple[str, ...]]
    """What is wrong with a GPU's NVLink fabric, by GPU; a GPU without complaints is absent."""
    ops: Mapping[tuple[str, str], OpCounts]
    """By (GPU, op); GPU is `unknown` where the agent does not know."""
    rank_ops: Mapping[tuple[str, str, str], OpCounts]
    """By (comm, rank, op); empty where the agent does not tell."""
    living: frozenset[RankKey] | None
    """Ranks whose end of the communicator was there just after this moment; None: the agent does not tell."""
    rank_processes: Mapping[str, ScrapedProcess]
    """By pid; empty where the agent does not tell."""
    completed: Mapping[str, CompletedCounts]
    """By op."""
    stalls: tuple[ScrapedStall, ...]
    ended_stalls: tuple[ScrapedStall, ...]
    """Oldest first."""
    failing_collectors: tuple[str, ...]
    transfers: Mapping[TransferKey, ScrapedTransfer] = field(default_factory=dict)
    """Empty where the agent does not tell."""


_STEPS: Final = f"{catalogue.JOB_STEP_SECONDS.name}_count"
_STEP_SECONDS: Final = f"{catalogue.JOB_STEP_SECONDS.name}_sum"
_NAMES: Final = frozenset(
    metric.name
    for metric in (
        *(catalogue.BUILD_INFO, catalogue.SNAPSHOT_TIMESTAMP, catalogue.PROCESSES_OBSERVED),
        *(catalogue.COLLECTIVE_CALLS, catalogue.COLLECTIVE_PAYLOAD_BYTES),
        *(catalogue.COMM_INFO, catalogue.COMM_ENQUEUED, catalogue.COMM_COMPLETED, catalogue.COMM_INFLIGHT_SECONDS),
        *(catalogue.COMM_REPLAYED, catalogue.COMM_COUNTED_FROM_START, catalogue.COMM_SEQUENCE),
        *(catalogue.COMM_OPERATIONS, catalogue.COMM_OPERATION_SECONDS),
        *(catalogue.COMM_ARRIVAL_LAG_SECONDS, catalogue.COLLECTIVE_COMPLETED_PAYLOAD_BYTES),
        *(catalogue.COLLECTIVE_COMPLETED_BUS_BYTES, catalogue.COLLECTIVE_COMPLETED_SECONDS),
        *(catalogue.RAIL_INFO, catalogue.RAIL_UP, catalogue.RAIL_SPEED, catalogue.RAIL_TRANSMIT_BYTES),
        *(
            catalogue.RAIL_RECEIVE_BYTES,
            catalogue.RAIL_EXPECTED_WIRE_BYTES,
            catalogue.RAIL_EXPLAINED_RATIO,
            catalogue.RAIL_COUNTER,
        ),
        catalogue.RAIL_BYTES_BY_OWNER,
        catalogue.JOB_STEP_PART_SECONDS,
        *(catalogue.RAIL_QUEUE_DROPS, catalogue.COLLECTOR_SUCCESS, catalogue.GPU_INFO),
        *(catalogue.GPU_FABRIC_UNHEALTHY, catalogue.NVLINK_INFO, catalogue.NVLINK_UP, catalogue.GPU_NVLINK_SPEED),
        *(catalogue.NVLINK_TRANSMIT_BYTES, catalogue.NVLINK_RECEIVE_BYTES, catalogue.NVLINK_ERRORS),
        *(catalogue.GPU_NVLINK_TRANSMIT_BYTES, catalogue.GPU_NVLINK_RECEIVE_BYTES, catalogue.GPU_NVLINK_ERRORS),
    )
) | {_STEPS, _STEP_SECONDS}


def parse_scrape(
    exposition: str, stalls: bytes | None, communicators: bytes | None = None, transfers: bytes | None = None
) -> NodeScrape:
    """The facts in an agent's metrics, and in its pages of stalls, communicators and transfers where it has them.

    Raises:
        ScrapeError: these are not an agent's pages.
    """
    try:
        samples = _Samples(parse_samples(exposition, _NAMES))
    except ValueError as error:
        raise ScrapeError(f"its metrics cannot be read: {error}") from None
    build = samples.named(catalogue.BUILD_INFO.name)
    moment = samples.named(catalogue.SNAPSHOT_TIMESTAMP.name)
    if not build or not moment:
        raise ScrapeError("it does not serve railscope's metrics")
    at_seconds = moment[0].value
    processes = samples.named(catalogue.PROCESSES_OBSERVED.name)
    current, ended = _stalls(stalls, at_seconds) if stalls is not None else ((), ())
    told = _communicators(communicators) if communicators is not None else _NOT_TOLD
    try:
        transferred = parse_transfers(transfers) if transfers is not None else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ScrapeError("/transfers cannot be parsed: does the agent have this version?") from None
    return NodeScrape(
        at_seconds=at_seconds,
        version=build[0].labels.get("version", "unknown"),
        simulated=build[0].labels.get("simulated") == "true",
        processes=int(processes[0].value) if processes else None,
        ranks=_ranks(samples),
        jobs=_jobs(samples),
        rails=_rails(samples),
        nvlinks=_nvlinks(samples),
        gpu_names={
            labels.get("gpu", ""): labels.get("name", "") for labels, _ in samples.named(catalogue.GPU_INFO.name)
        },
        nvlink_speeds={key[0]: speed for key, speed in samples.sum_by(catalogue.GPU_NVLINK_SPEED.name, "gpu").items()},
        gpu_complaints=_complaints(samples),
        ops=_ops(samples),
        rank_ops=told.ops,
        living=told.living,
        rank_processes=told.processes,
        completed=_completed(samples),
        stalls=current,
        ended_stalls=ended,
        failing_collectors=tuple(
            labels.get("collector", "")
            for labels, value in samples.named(catalogue.COLLECTOR_SUCCESS.name)
            if not value
        ),
        transfers=transferred,
    )


class _Samples:
    """The samples of a scrape, indexed by labels."""

    def __init__(self, by_name: Mapping[str, list[ScrapedSample]]) -> None:
        self._by_name = by_name
        self._keys: dict[tuple[str, ...], dict[int, tuple[str, ...]]] = {}

    def named(self, name: str) -> list[ScrapedSample]:
        return self._by_name.get(name, [])

    def sum_by(self, name: str, *labels: str, **only: str) -> dict[tuple[str, ...], float]:
        """Values by some labels, of series that carry the given others; of those that meet, the sum."""
        found: dict[tuple[str, ...], float] = {}
        keys = self._keys.setdefault(labels, {})
        for own, value in self.named(name):
            if only and any(own.get(label) != wanted for label, wanted in only.items()):
                continue
            # Series with the same label set share one mapping.
            key = keys.get(id(own))
            if key is None:
                key = keys[id(own)] = tuple([own.get(label, "") for label in labels])
            found[key] = found[key] + value if key in found else value
        return found


def _ranks(samples: _Samples) -> dict[RankKey, ScrapedRank]:
    of_rank = ("comm", "rank")
    enqueued = samples.sum_by(catalogue.COMM_ENQUEUED.name, *of_rank)
    from_start = samples.sum_by(catalogue.COMM_COUNTED_FROM_START.name, *of_rank)
    estimated = samples.sum_by(catalogue.COMM_ESTIMATED.name, *of_rank)
    sequence = samples.sum_by(catalogue.COMM_SEQUENCE.name, *of_rank)
    completed = samples.sum_by(catalogue.COMM_COMPLETED.name, *of_rank)
    replayed = samples.sum_by(catalogue.COMM_REPLAYED.name, *of_rank)
    inflight = samples.sum_by(catalogue.COMM_INFLIGHT_SECONDS.name, *of_rank)
    operations = samples.sum_by(catalogue.COMM_OPERATIONS.name, *of_rank)
    seconds = samples.sum_by(catalogue.COMM_OPERATION_SECONDS.name, *of_rank)
    lag = samples.sum_by(catalogue.COMM_ARRIVAL_LAG_SECONDS.name, *of_rank)
    info: dict[tuple[str, ...], Mapping[str, str]] = {}
    for labels, _ in samples.named(catalogue.COMM_INFO.name):
        # Two ends of one rank may be shown at once; numbers are shown by rank, so the first end names it.
        info.setdefault((labels.get("comm", ""), labels.get("rank", "")), labels)
    ranks = {}
    for key in dict.fromkeys((*info, *enqueued)):
        labels = info.get(key, {})
        comm, rank = key
        job = tuple((_FACT_OF.get(name, name), value) for name, value in labels.items() if name not in _OF_RANK)
        ranks[comm, rank] = ScrapedRank(
            identity=rank_identity_from_labels(comm, rank, labels, job),
            enqueued=enqueued.get(key),
            late=from_start.get(key) == 0,
            estimated=estimated.get(key),
            sequence=sequence.get(key),
            completed=completed.get(key),
            replayed=replayed.get(key),
            inflight_seconds=inflight.get(key),
            operations=operations.get(key),
            operation_seconds=seconds.get(key),
            arrival_lag_seconds=lag.get(key),
        )
    return ranks


def _jobs(samples: _Samples) -> dict[RankKey, ScrapedJob]:
    of_rank = ("comm", "rank")
    seconds = samples.sum_by(_STEP_SECONDS, *of_rank)
    parts: dict[tuple[str, ...], dict[str, float]] = {}
    for (comm, rank, part), value in samples.sum_by(catalogue.JOB_STEP_PART_SECONDS.name, *of_rank, "part").items():
        parts.setdefault((comm, rank), {})[part] = value
    names = {
        (labels.get("comm", ""), labels.get("rank", "")): labels.get(catalogue.EXPORTED_JOB, "")
        for labels, _ in samples.named(catalogue.COMM_INFO.name)
    }
    return {
        (key[0], key[1]): ScrapedJob(names.get((key[0], key[1]), ""), steps, seconds.get(key, 0.0), parts.get(key, {}))
        for key, steps in samples.sum_by(_STEPS, *of_rank).items()
    }


def _rails(samples: _Samples) -> dict[RailKey, ScrapedRail]:
    of_rail = ("rail", "device", "netns")
    up = samples.sum_by(catalogue.RAIL_UP.name, *of_rail)
    speed = samples.sum_by(catalogue.RAIL_SPEED.name, *of_rail)
    transmit = samples.sum_by(catalogue.RAIL_TRANSMIT_BYTES.name, *of_rail)
    receive = samples.sum_by(catalogue.RAIL_RECEIVE_BYTES.name, *of_rail)
    explained_out = samples.sum_by(catalogue.RAIL_EXPLAINED_RATIO.name, *of_rail, direction="transmit")
    explained_in = samples.sum_by(catalogue.RAIL_EXPLAINED_RATIO.name, *of_rail, direction="receive")
    expected_out = samples.sum_by(catalogue.RAIL_EXPECTED_WIRE_BYTES.name, *of_rail, direction="transmit")
    expected_in = samples.sum_by(catalogue.RAIL_EXPECTED_WIRE_BYTES.name, *of_rail, direction="receive")
    errors: dict[tuple[str, ...], dict[str, float]] = {}
    for labels, value in samples.named(catalogue.RAIL_COUNTER.name):
        if labels.get("severity") != _CONTEXT:
            key = tuple(labels.get(label, "") for label in of_rail)
            errors.setdefault(key, {})[labels.get("counter", "unknown")] = value
    for key, drops in samples.sum_by(catalogue.RAIL_QUEUE_DROPS.name, *of_rail).items():
        errors.setdefault(key, {})["queue_drops"] = drops
    owners: dict[tuple[str, ...], dict[str, float]] = {}
    for (*place, owner), moved in samples.sum_by(catalogue.RAIL_BYTES_BY_OWNER.name, *of_rail, "owner").items():
        owners.setdefault(tuple(place), {})[owner] = moved
    rails = {}
    for key in dict.fromkeys((*samples.sum_by(catalogue.RAIL_INFO.name, *of_rail), *transmit)):
        rail, device, netns = key
        rails[rail, device, netns] = ScrapedRail(
            rail=rail,
            device=device,
            netns=netns,
            up=bool(up[key]) if key in up else None,
            speed_bytes_per_second=speed.get(key),
            transmit_bytes=transmit.get(key),
            receive_bytes=receive.get(key),
            transmit_explained_ratio=explained_out.get(key),
            receive_explained_ratio=explained_in.get(key),
            errors=errors.get(key, {}),
            bytes_by_owner=owners.get(key, {}),
            transmit_expected_bytes=expected_out.get(key),
            receive_expected_bytes=expected_in.get(key),
        )
    return rails


def _nvlinks(samples: _Samples) -> dict[NvlinkKey, ScrapedNvlink]:
    of_link = ("gpu", "link")
    up = samples.sum_by(catalogue.NVLINK_UP.name, *of_link)
    transmit = samples.sum_by(catalogue.NVLINK_TRANSMIT_BYTES.name, *of_link)
    receive = samples.sum_by(catalogue.NVLINK_RECEIVE_BYTES.name, *of_link)
    errors: dict[tuple[str, ...], dict[str, float]] = {}
    for (gpu, link, kind), count in samples.sum_by(catalogue.NVLINK_ERRORS.name, *of_link, "kind").items():
        errors.setdefault((gpu, link), {})[kind] = count
    links = {}
    for key in samples.sum_by(catalogue.NVLINK_INFO.name, *of_link):
        gpu, link = key
        links[gpu, link] = ScrapedNvlink(
            gpu=gpu,
            link=link,
            up=bool(up[key]) if key in up else None,
            transmit_bytes=transmit.get(key),
            receive_bytes=receive.get(key),
            errors=errors.get(key, {}),
        )
    sent, received = (
        samples.sum_by(metric.name, "gpu")
        for metric in (catalogue.GPU_NVLINK_TRANSMIT_BYTES, catalogue.GPU_NVLINK_RECEIVE_BYTES)
    )
    of_all: dict[tuple[str, ...], dict[str, float]] = {}
    of_single = {(gpu, kind) for (gpu, _), found in errors.items() for kind in found}
    for (gpu, kind), count in samples.sum_by(catalogue.GPU_NVLINK_ERRORS.name, "gpu", "kind").items():
        if count and (gpu, kind) not in of_single:
            of_all.setdefault((gpu,), {})[kind] = count
    for one in sent.keys() | received.keys() | of_all.keys():
        links[one[0], ALL_LINKS] = ScrapedNvlink(
            one[0], ALL_LINKS, None, sent.get(one), received.get(one), of_all.get(one, {})
        )
    return links


def _complaints(samples: _Samples) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for gpu, reason in samples.sum_by(catalogue.GPU_FABRIC_UNHEALTHY.name, "gpu", "reason"):
        found[gpu] = (*found.get(gpu, ()), reason)
    return found


def _ops(samples: _Samples) -> dict[tuple[str, str], OpCounts]:
    payload = samples.sum_by(catalogue.COLLECTIVE_PAYLOAD_BYTES.name, "gpu", "op")
    calls = samples.sum_by(catalogue.COLLECTIVE_CALLS.name, "gpu", "op")
    return {(key[0], key[1]): OpCounts(count, payload.get(key)) for key, count in calls.items()}


def _completed(samples: _Samples) -> dict[str, CompletedCounts]:
    payload = samples.sum_by(catalogue.COLLECTIVE_COMPLETED_PAYLOAD_BYTES.name, "op")
    bus = samples.sum_by(catalogue.COLLECTIVE_COMPLETED_BUS_BYTES.name, "op")
    seconds = samples.sum_by(catalogue.COLLECTIVE_COMPLETED_SECONDS.name, "op")
    return {
        key[0]: CompletedCounts(payload[key], bus[key], seconds[key])
        for key in seconds
        if key in payload and key in bus
    }


def _stalls(page: bytes, at_seconds: float) -> tuple[tuple[ScrapedStall, ...], tuple[ScrapedStall, ...]]:
    try:
        document = json.loads(page)
        current = tuple(_stall(one, at_seconds) for one in document["stalls"])
        return current, tuple(_stall(one, at_seconds) for one in document["ended"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ScrapeError("/stalls cannot be parsed: does the agent have this version?") from None


def _stall(given: Mapping[str, Any], at_seconds: float) -> ScrapedStall:
    ended_ns = given.get("ended_realtime_ns")
    blamed_rank = given["blamed_rank"]
    return ScrapedStall(
        comm=str(given["comm"]),
        rank=_label(given["rank"]),
        nranks=_label(given["nranks"]),
        op=str(given["op"]),
        cause=str(given["cause"]),
        strength=str(given["strength"]),
        pid=_label(given.get("pid")),
        process=_process(given.get("process", {})),
        seconds=float(given["seconds"]),
        ended_seconds_ago=None if ended_ns is None else max(0.0, at_seconds - float(ended_ns) / 1e9),
        blamed_rank="" if blamed_rank is None else str(blamed_rank),
        rail=str(given["rail"]),
        device=str(given["device"]),
        netns=str(given.get("netns", "")),
        evidence=tuple(str(sentence) for sentence in given["evidence"]),
        library=str(given.get("library", "")),
        peer=str(given.get("peer", "")),
        blamed_pid=str(given.get("blamed_pid", "")),
    )


def _process(given: Mapping[str, Any]) -> ScrapedProcess:
    return ScrapedProcess(
        user=str(given.get("user", "")),
        program=str(given.get("program", "")),
        start_realtime_ns=_known(given, "start_realtime_ns", int),
        read_realtime_ns=_known(given, "read_realtime_ns", int),
        cpu_seconds=_known(given, "cpu_seconds", float),
        resident_bytes=_known(given, "resident_bytes", int),
        threads=_known(given, "threads", int),
    )


def _known(given: Mapping[str, Any], name: str, number: type[Number]) -> Number | None:
    return None if given.get(name) is None else number(given[name])


def _label(number: object) -> str:
    """A rank as the metrics' label has it."""
    return "unknown" if number is None else str(number)


@dataclass(frozen=True, slots=True)
class _Communicators:
    """The page of communicators."""

    ops: Mapping[tuple[str, str, str], OpCounts]
    living: frozenset[RankKey] | None
    """It leaves out what has ended."""
    processes: Mapping[str, ScrapedProcess]


_NOT_TOLD: Final = _Communicators({}, None, {})


def _communicators(page: bytes) -> _Communicators:
    try:
        document = json.loads(page)
        found: dict[tuple[str, str, str], OpCounts] = {}
        living: set[RankKey] = set()
        for one in document["communicators"]:
            rank = _label(one["rank"])
            living.add((str(one["comm"]), rank))
            for op in one["ops"]:
                key = (str(one["comm"]), rank, str(op["op"]))
                calls, payload_bytes = float(op["calls"]), float(op["payload_bytes"])
                before = found.get(key)
                if before is not None:
                    calls, payload_bytes = calls + before.calls, payload_bytes + (before.payload_bytes or 0.0)
                found[key] = OpCounts(calls, payload_bytes)
        processes = {_label(one["pid"]): _process(one) for one in document.get("processes", ())}
        return _Communicators(found, frozenset(living), processes)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ScrapeError("/communicators cannot be parsed: does the agent have this version?") from None
