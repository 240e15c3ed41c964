"""Reads from a Prometheus-compatible store what it knows of the fleet at one moment.

Series become facts here, and nothing is concluded yet (agent/cluster/verdict/verdict.py does that).  What a host says
that is heard now is kept apart from what it said before it fell silent, or before its agent was started anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from railscope.agent.cluster.fleet.apart import apart_communicators, apart_question, standing_question
from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.awaited import awaited_ranks
from railscope.agent.cluster.fleet.facts import (
    Fleet,
    HardwareSign,
    LongWait,
    Moving,
    PastTransfer,
    Rail,
    Rank,
    ReportedStall,
    SilentProcess,
    SlowRail,
    SlowRank,
    Stall,
    StallHistory,
)
from railscope.agent.cluster.fleet.failovers import failed_over
from railscope.agent.cluster.fleet.hardware import read_hardware
from railscope.agent.cluster.fleet.history import Points, increase, mean_rate, usual_rate
from railscope.agent.cluster.fleet.prometheus import PrometheusError, Sample, Series, Store
from railscope.agent.cluster.fleet.rails import read_rails
from railscope.agent.cluster.fleet.scrapes import (
    MOST_POINTS,
    REMEMBERED,
    Scrapes,
    match_any,
    match_prefix,
    rate_seconds_of,
    read_scrapes,
    recent_seconds_of,
)
from railscope.agent.cluster.fleet.sequences import StoredRankKey, find_positions, stored_rank_key
from railscope.agent.cluster.fleet.silent import read_silent_processes
from railscope.agent.cluster.fleet.slow import read_slow_ranks, slow_question, uneven_question
from railscope.agent.cluster.fleet.slow_rails import read_slow_rails, slow_rails_questions
from railscope.agent.cluster.fleet.stalls import (
    brief_questions,
    brief_stalls,
    parse_stalls,
    stall_histories,
    with_details,
)
from railscope.agent.cluster.fleet.stuck_transfers import (
    TransferStalls,
    read_past_transfers,
    read_stuck_transfers,
    stuck_transfer_questions,
)
from railscope.agent.facts import catalogue
from railscope.agent.facts.communicator_names import HASH_DIGITS, describe_ambiguity
from railscope.agent.facts.label_numbers import parse_number
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.facts.stall import LastCollectives, parse_shapes

_LABELS_OF_JOB: Final = {"job": "exported_job", "world_rank": "world_rank", "user": "user"}
"""The store's own label `job` is that of the scrape."""
_LONG_SECONDS: Final = 30.0
"""An operation in flight for longer is worth a word even where no host calls it a stall."""
_MOST_LONG: Final = 16
"""Operations that are in flight for long, the oldest first."""
HISTORY: Final = "which stalls have ended lately"
WRITING: Final = "which ranks write a checkpoint"
MAKING: Final = "which ranks are inside a call that makes a communicator"
SILENT: Final = "which processes were there before their agents and have made no call since"
LONG: Final = "which operations have been under way for long"
SLOW: Final = "which ranks are slow"
SLOW_RAILS: Final = "which rails are slow or lose packets"
FAILED_OVER: Final = "which connections NCCL moved off a port that failed"
APART: Final = "which ranks are behind that no host calls stalled yet"
RANKS: Final = "how far the ranks came that are concerned"
RAILS: Final = "how the rails of the hosts concerned are"
TRANSFERS: Final = "which transfers of other libraries do not complete"
HARDWARE: Final = "whether hardware of the hosts concerned failed"
MOVING: Final = "which other communicators go on there"
_MOST_HOSTS: Final = 64
"""Rails are asked for on so many hosts at most, those first that a stall names."""


def find_communicator(store: Store, text: str, at: float | None = None) -> str:
    """The full hash of the store's communicator of the last hour that begins so; what was given where none does.

    Raises:
        PrometheusError: the store does not answer, or several begin so.
    """
    if len(text) >= HASH_DIGITS:
        return text
    info = f"{catalogue.COMM_INFO}{{{match_prefix('comm', text)}}}"
    found = store.query(f"count by (comm) (last_over_time({info}[{REMEMBERED}]))", at)
    comms = {sample.labels.get("comm", "") for sample in found}
    if text in comms or not comms:
        return text
    if len(comms) > 1:
        raise PrometheusError(describe_ambiguity("--comm", text, comms))
    return comms.pop()


def read_fleet(store: Store, *, window_seconds: float, at: float | None = None, comm: str | None = None) -> Fleet:
    """Ask the store for everything a verdict needs.

    Raises:
        PrometheusError: the store does not answer, has no series of railscope, or none of `comm`.
    """
    if at is None:
        clock = store.query("time()")
        if not clock:
            raise PrometheusError("the store does not report its time: is it a Prometheus?")
        at = clock[0].value
    ask = Asker(store, at)
    scrapes = read_scrapes(ask)
    recent_seconds = recent_seconds_of(scrapes.interval_seconds)
    rate_seconds = rate_seconds_of(scrapes.interval_seconds)
    looked_back = max(window_seconds, recent_seconds)
    said = ask.query_all(
        stalled=f"{catalogue.COMM_STALLED} == 1",
        info=f"{catalogue.COMM_STALL_INFO} == 1",
        count=f"count(count by (comm) ({catalogue.COMM_ENQUEUED}))",
    )
    said |= ask.query_some(_questions(scrapes, looked_back, recent_seconds))
    # Of hosts that are heard no more, too: what they said before is in the history of stalls.
    lately = said["stuck_lately"]
    of_transfers = TransferStalls.from_samples(lately)
    said = {name: _fresh(samples, scrapes) for name, samples in said.items()}
    for name in ("stalled", "info", "lengthened", "appeared"):
        said[name] = tuple(one for one in said[name] if not of_transfers.is_one(one.labels))
    told = int(said["told"][0].value) if said["told"] else 0
    wrote = {sample.labels.get("comm", "") for sample in said["wrote"]}
    history = tuple(
        replace(one, wrote=one.comm in wrote)
        for one in ask.attempt(
            HISTORY, lambda: stall_histories(ask, scrapes, told, looked_back, recent_seconds, of_transfers)
        )
    )
    stalled = {sample.labels.get("comm", "") for sample in said["stalled"]}
    asked = stalled | ({comm} if comm else set())
    told_of = stalled | {one.comm for one in history if at - one.last <= recent_seconds}
    # Whoever waits for one that writes may be waited for elsewhere, and its own host calls it no stall.
    concerned = asked | told_of
    concerned |= {sample.labels.get("comm", "") for sample in said["writes"]} if concerned else set()

    def ranks_of(comms: Collection[str]) -> tuple[Rank, ...]:
        def read() -> tuple[Rank, ...]:
            return _ranks(ask, scrapes, comms, said, history, rate_seconds, window_seconds)

        # Who only waits for a checkpoint would be blamed, or one who is inside a call be taken for missing.
        answered = not any(what in ask.unanswered for what in (WRITING, MAKING))
        return ask.attempt(RANKS, read) if comms and answered else ()

    ranks = ranks_of(concerned)
    reported = () if any(rank.stall for rank in ranks) else _reported(said, scrapes)
    if comm and RANKS not in ask.unanswered and not any(rank.comm == comm for rank in ranks):
        raise PrometheusError(
            f"no communicator {comm} within the last hour: see the label comm of {catalogue.COMM_ENQUEUED}"
        )
    slow = ask.attempt(SLOW, lambda: _slow(ask, scrapes, said, told_of, window_seconds))
    apart = ask.attempt(APART, lambda: _apart(ask, scrapes, said["standing"], window_seconds))
    ranks = (*ranks, *ranks_of({*apart, *(one.comm for one in slow)} - concerned))
    ranks = (*ranks, *awaited_ranks(said["inside"], said["without_comm"], scrapes, ranks))
    instances = _instances_of(said["info"], ranks, scrapes.names)

    def silent() -> tuple[SilentProcess, ...]:
        return read_silent_processes(ask, scrapes, said["without_comm"], said["inside"])

    def goes_on() -> tuple[Sample, ...]:
        enqueued = catalogue.COMM_ENQUEUED.where(match_any("instance", instances))
        # What stopped within the range of the rate does not go on.
        lately = f"{_moves(enqueued, scrapes)} > 0"
        return ask(f"max by (comm, instance) (rate({enqueued}[{rate_seconds:.0f}s]) and {lately}) > 0")

    def rails_of() -> tuple[Rail, ...]:
        return read_rails(ask, scrapes, instances, rate_seconds, window_seconds)

    def hardware() -> tuple[HardwareSign, ...]:
        return read_hardware(ask, scrapes, window_seconds)

    def slow_rails() -> tuple[SlowRail, ...]:
        return read_slow_rails(ask, scrapes, said["slow_rails"], said["lossy_rails"], window_seconds)

    def past_transfers() -> tuple[PastTransfer, ...]:
        return read_past_transfers(ask, scrapes, said["stuck"], lately, looked_back)

    slow_of_rails = ask.attempt(SLOW_RAILS, slow_rails)
    return Fleet(
        at=at,
        window_seconds=window_seconds,
        scrape_seconds=scrapes.interval_seconds,
        agents=scrapes.agents,
        ranks=ranks,
        rails=ask.attempt(RAILS, rails_of) if ranks else (),
        hardware=ask.attempt(HARDWARE, hardware) if ranks or slow_of_rails else (),
        moving=tuple(
            Moving(one.labels.get("comm", ""), scrapes.names.get(one.labels.get("instance", ""), "unknown"), one.value)
            for one in (ask.attempt(MOVING, goes_on) if ranks else ())
            if one.labels.get("comm") not in asked
        ),
        waiting=tuple(
            LongWait(one.labels.get("comm", ""), one.labels.get("rank", ""), _host(one, scrapes.names), one.value)
            for one in said["waiting"]
            if one.labels.get("comm") not in asked
        ),
        slow=slow,
        slow_rails=slow_of_rails,
        failed_over=ask.attempt(FAILED_OVER, lambda: failed_over(ask, said["degraded"], scrapes.names, rate_seconds)),
        apart=apart,
        communicators=int(said["count"][0].value) if said["count"] else 0,
        history=history,
        brief=brief_stalls(said, history, scrapes),
        recent_seconds=recent_seconds,
        reported=reported,
        silent=ask.attempt(SILENT, silent),
        stuck_transfers=read_stuck_transfers(said["stuck"], scrapes),
        past_transfers=ask.attempt(TRANSFERS, past_transfers) if lately else (),
        unanswered=tuple(ask.unanswered.items()),
    )


def _questions(scrapes: Scrapes, looked_back: float, recent_seconds: float) -> dict[str, dict[str, str]]:
    """What is asked about the whole fleet beside its stalls, by what is not known without it.

    A question about every rank of a fleet is asked by communicator, and of single ranks where the answer says so.
    """
    long = f"{catalogue.COMM_INFLIGHT_SECONDS} > {_LONG_SECONDS:g}"
    return {
        WRITING: {
            "wrote": f"max_over_time({catalogue.COMM_WRITING}[{looked_back:.0f}s]) == 1",
            "writes": _writing("", scrapes),
        },
        MAKING: {"inside": str(catalogue.CALL_INSIDE_SECONDS), "without_comm": str(catalogue.PROCESS_WITHOUT_COMM)},
        HISTORY: {
            "told": f"count(last_over_time({catalogue.COMM_STALL_INFO}[{looked_back:.0f}s]))",
            **brief_questions(recent_seconds),
        },
        LONG: {"waiting": f"topk({_MOST_LONG}, {long} unless on (comm) {catalogue.COMM_STALLED} == 1)"},
        SLOW: {"uneven": uneven_question(scrapes), "awaited": str(catalogue.COMM_AWAITED)},
        FAILED_OVER: {"degraded": str(catalogue.COMM_DEGRADED)},
        APART: {"standing": standing_question(scrapes)},
        SLOW_RAILS: slow_rails_questions(scrapes),
        TRANSFERS: stuck_transfer_questions(looked_back),
    }


def _slow(
    ask: Asker,
    scrapes: Scrapes,
    said: Mapping[str, tuple[Sample, ...]],
    told_of: Collection[str],
    window_seconds: float,
) -> tuple[SlowRank, ...]:
    """Ranks that the others wait for; not of communicators that are stalled, where ranks wait too, nor who writes."""
    if WRITING in ask.unanswered:
        return ()
    uneven = {one.labels.get("comm", "") for one in said["uneven"]} - {*told_of}
    lately = _fresh(ask(slow_question(scrapes, uneven)), scrapes) if uneven else ()
    writers = {stored_rank_key(one) for one in said["wrote"]}
    waited_for, awaited = (
        [one for one in samples if one.labels.get("comm") not in told_of and stored_rank_key(one) not in writers]
        for samples in (lately, said["awaited"])
    )
    return read_slow_ranks(ask, scrapes, waited_for, awaited, window_seconds)


def _apart(ask: Asker, scrapes: Scrapes, standing: Iterable[Sample], window_seconds: float) -> tuple[str, ...]:
    """Communicators that stand with ranks in different places, and whose ranks all moved a while ago."""
    comms = {one.labels.get("comm", "") for one in standing}
    found = ask(apart_question(scrapes, comms, window_seconds)) if comms else ()
    return apart_communicators(one for one in found if one.labels.get("comm") in comms)


def _reported(said: Mapping[str, tuple[Sample, ...]], scrapes: Scrapes) -> tuple[ReportedStall, ...]:
    """What hosts say of their ranks, from which nothing is concluded."""
    return tuple(
        ReportedStall(comm, scrapes.names.get(instance, instance or "unknown"), rank, stall)
        for (instance, comm, rank), stall in parse_stalls(said["stalled"], said["info"]).items()
    )


def _host(sample: Sample | Series, names: Mapping[str, str]) -> str:
    instance = sample.labels.get("instance", "")
    return names.get(instance, instance or "unknown")


def _fresh(samples: Iterable[Sample], scrapes: Scrapes) -> tuple[Sample, ...]:
    """Those of hosts that are heard, and what is of several hosts together."""
    return tuple(one for one in samples if "instance" not in one.labels or one.labels["instance"] in scrapes.fresh)


def _by_rank(samples: Iterable[Sample]) -> dict[StoredRankKey, float]:
    found: dict[StoredRankKey, float] = {}
    for sample in samples:
        key = stored_rank_key(sample)
        found[key] = max(found.get(key, sample.value), sample.value)
    return found


def _writing(selector: str, scrapes: Scrapes) -> str:
    """The query for ranks that write to storage.

    The hosts of those that wait may be scraped later, so that who has just gone on is still meant; or sooner, so that
    of a moment that is over the writer's next scrape counts too, though it be late.
    """
    return (
        f"max_over_time({catalogue.COMM_WRITING}{selector}[{scrapes.promql_range(4)}] offset "
        f"-{scrapes.promql_range(1.5)})"
    )


def _moves(enqueued: str, scrapes: Scrapes) -> str:
    """Whether operations were entered between the last scrapes, as a question."""
    return f"changes({enqueued}[{scrapes.promql_range(2.5)}])"


def _ranks(
    ask: Asker,
    scrapes: Scrapes,
    comms: Collection[str],
    said: Mapping[str, tuple[Sample, ...]],
    history: Iterable[StallHistory],
    rate_seconds: float,
    window_seconds: float,
) -> tuple[Rank, ...]:
    """Every rank of these communicators that the store knows."""
    of = match_any("comm", comms)
    enqueued = catalogue.COMM_ENQUEUED.where(of)
    found = ask.query_all(
        info=f"last_over_time({catalogue.COMM_INFO.where(of)}[{REMEMBERED}])",
        enqueued=enqueued,
        completed=catalogue.COMM_COMPLETED.where(of),
        inflight=catalogue.COMM_INFLIGHT_SECONDS.where(of),
        from_start=catalogue.COMM_COUNTED_FROM_START.where(of),
        ended=catalogue.COMM_ENDED.where(of),
        had_ended=f"last_over_time({catalogue.COMM_ENDED.where(of)}[{REMEMBERED}])",
        sequence=catalogue.COMM_SEQUENCE.where(of),
        resets=f"resets({enqueued}[{window_seconds:.0f}s])",
        rate=f"rate({enqueued}[{rate_seconds:.0f}s])",
        writing=_writing(f"{{{of}}}", scrapes),
        last=catalogue.COMM_STALL_COLLECTIVES.where(of),
        moves=_moves(enqueued, scrapes),
    )
    numbers = {name: _by_rank(samples) for name, samples in found.items()}
    now = {key: value for key, value in numbers["enqueued"].items() if key[0] in scrapes.fresh}
    known = max(len(now), len(found["info"]), 1)
    points_seconds = min(window_seconds, scrapes.spacing_seconds * MOST_POINTS / known)
    points = _points(ask.store.scrapes(enqueued, points_seconds, ask.at))
    placed = find_positions(
        now=now,
        from_start=numbers["from_start"],
        sequence=numbers["sequence"],
        resets=numbers["resets"],
        history=points,
    )
    # The other communicators' are told of where those are read.
    stalls = {key: one for key, one in parse_stalls(said["stalled"], said["info"]).items() if key[1] in comms}
    lengths = _lengths(ask.store.scrapes(catalogue.COMM_STALL_SECONDS.where(of), points_seconds, ask.at), points)
    stalled_first = {one.comm: one.first for one in history}
    # Of a communicator that is still being made there is no more than who is inside the call.
    inside = {stored_rank_key(sample): sample for sample in said["inside"]}
    jobs = {_process(sample): sample.labels for sample in said["without_comm"]}
    infos: dict[StoredRankKey, Mapping[str, str]] = {
        key: {**jobs.get(_process(one), {}), **one.labels} for key, one in inside.items() if key in stalls
    }
    infos |= {stored_rank_key(sample): sample.labels for sample in found["info"]}

    last = {
        stored_rank_key(sample): LastCollectives(int(sample.value), parse_shapes(sample.labels.get("last", "")))
        for sample in found["last"]
    }

    def whole(name: str, key: StoredRankKey) -> int | None:
        value = numbers[name].get(key)
        return None if value is None else int(value)

    ranks = []
    for key in sorted({*infos, *now, *stalls}, key=lambda key: (key[1], _number(key[2]), key[0])):
        instance, comm, rank = key
        labels = infos.get(key, {})
        job = tuple((fact, labels.get(label, "")) for fact, label in _LABELS_OF_JOB.items())
        present = key in now or key in stalls
        if not present and any(other[1:] == key[1:] for other in now):
            continue  # it moved to another host, or is scraped twice
        ranks.append(
            Rank(
                identity=rank_identity_from_labels(comm, rank, labels, job),
                host=scrapes.names.get(instance, instance or "unknown"),
                present=present,
                # One that is seen may be a later job's, where jobs fix NCCL's id.
                ended=key in numbers["ended" if present else "had_ended"],
                enqueued=whole("enqueued", key) if present else None,
                completed=whole("completed", key) if present else None,
                inflight_seconds=_age(numbers["inflight"].get(key), inside.get(key)) if present else None,
                position=placed.get(key),
                calls_per_second=numbers["rate"].get(key) if present else None,
                moving=present and bool(numbers["moves"].get(key)),
                usual_calls_per_second=usual_rate(points.get(key, ()), before=stalled_first.get(comm)),
                # A rank that is counted since later did other things in that time than the others.
                mean_calls_per_second=(
                    mean_rate(points.get(key, ())) if present and numbers["from_start"].get(key) != 0 else None
                ),
                stall=stalls.get(key),
                last=last.get(key),
                writing=present and bool(numbers["writing"].get(key)),
                stalled_seconds=lengths.get(key) if present else None,
                scraped=scrapes.scraped.get(instance) if present else None,
            )
        )
    return _with_history(ask, scrapes, ranks, of, window_seconds)


def _process(sample: Sample) -> tuple[str, str]:
    return sample.labels.get("instance", ""), sample.labels.get("pid", "")


def _age(in_flight: float | None, inside: Sample | None) -> float | None:
    """For how long a rank has waited: inside an operation, or a call that does not return."""
    ages = [age for age in (in_flight, inside.value if inside is not None else None) if age is not None]
    return max(ages, default=None)


def _points(series: Iterable[Series]) -> dict[StoredRankKey, Points]:
    """History by rank; of replicas' the longest."""
    found: dict[StoredRankKey, Points] = {}
    for one in series:
        key = stored_rank_key(one)
        if len(one.points) > len(found.get(key, ())):
            found[key] = one.points
    return found


def _lengths(series: Iterable[Series], calls: Mapping[StoredRankKey, Points]) -> dict[StoredRankKey, float]:
    """For how long each rank was stalled, over all causes."""
    found: dict[StoredRankKey, float] = defaultdict(float)
    for one in series:
        key = stored_rank_key(one)
        of_rank = calls.get(key, ())
        found[key] += increase(one.points, of_rank[0][0] if of_rank else None)
    return found


def _with_history(
    ask: Asker, scrapes: Scrapes, ranks: Sequence[Rank], of: str, window_seconds: float
) -> tuple[Rank, ...]:
    """The ranks; those that are gone with their host's last report."""
    gone = {rank.host for rank in ranks if not rank.present}
    if not gone:
        return tuple(ranks)
    on = match_any("instance", (instance for instance, name in scrapes.names.items() if name in gone))
    stalls = ask.store.scrapes(f"{catalogue.COMM_STALL_INFO}{{{of},{on}}}", window_seconds, ask.at)
    seen = ask.store.scrapes(f"{catalogue.COMM_ENQUEUED}{{{of},{on}}}", window_seconds, ask.at)
    last_seen = {stored_rank_key(one): one.points[-1][0] for one in seen if one.points}
    said = {}
    for one in stalls:
        key = stored_rank_key(one)
        # Only what was still said when the rank was last seen: what had ended before is no matter.
        if one.points and one.points[-1][0] >= last_seen.get(key, 0.0) - 2 * scrapes.spacing_seconds:
            host = _host(one, scrapes.names)
            said[host, *key[1:]] = with_details(Stall("", one.labels.get("cause", "unknown")), one.labels)
    return tuple(
        rank if rank.present else replace(rank, last_said=said.get((rank.host, rank.comm, rank.rank))) for rank in ranks
    )


def _number(text: str) -> int:
    number = parse_number(text)
    return -1 if number is None else number


def _instances_of(info: Iterable[Sample], ranks: Iterable[Rank], names: Mapping[str, str]) -> list[str]:
    """Hosts whose rails may matter, those first that a stall's evidence names."""
    instance_of = {name: instance for instance, name in names.items()}
    named = [one.labels.get("instance", "") for one in info if one.labels.get("device")]
    others = [instance_of[rank.host] for rank in ranks if rank.present and rank.host in instance_of]
    return list(dict.fromkeys([*named, *others]))[:_MOST_HOSTS]
