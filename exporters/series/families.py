"""Converts a `Snapshot` to metric families.

Two rules hold for whatever the agent saw.  No two series of a family have the same labels, because one duplicate
makes Prometheus refuse the whole scrape: counters that meet are added, of other values the first stays.  And there
are never more series than the budget allows: a tenant that has more than the others loses detail of its ranks first
(trimming.py); the node's totals and railscope's own health stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import Labels, RankIdentity, RankKey
from railscope.agent.facts.snapshot import (
    AgentHealth,
    CommunicatorFacts,
    JobSteps,
    NodeCollectives,
    NodeStalls,
    ProbeHealth,
    RailFacts,
    Snapshot,
)
from railscope.agent.facts.stall import LastCollectives, format_shapes
from railscope.exporters.series import buckets
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.condition_families import condition_families
from railscope.exporters.series.earlier import EarlierTotals, rank_pids
from railscope.exporters.series.fabric_families import fabric_families
from railscope.exporters.series.family import Family, LabelValues, Sample
from railscope.exporters.series.family_draft import Draft, make_draft, make_draft_by_label
from railscope.exporters.series.gpu_families import gpu_families
from railscope.exporters.series.printable_labels import PrintableLabels, make_printable
from railscope.exporters.series.rail_families import rail_families
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.transfer_families import transfer_families
from railscope.exporters.series.trimming import Detail, goes_with_rank, trim

DROPPED_BY_CAP: Final = "cap"
"""Reason in `series_dropped_total` for what the series budget left out."""

_SAMPLES_PER_PAUSE: Final = 250
_LABELS: Final = {"job": catalogue.EXPORTED_JOB}
"""Labels of facts whose names Prometheus gives to every series: with honor_labels `job` would take the scrape's place,
and no series would join another of its host."""
_NOT_IN_LABEL_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")


def make_families(
    snapshot: Snapshot,
    budget: SeriesBudget | None = None,
    pause: Callable[[], None] = lambda: None,
    selection: Selection | None = None,
    earlier: EarlierTotals | None = None,
    labels: PrintableLabels | None = None,
) -> tuple[Family, ...]:
    """All families of the snapshot that have at least one sample, in the catalogue's order.

    What exceeds the budget is left out and added to the budget's total, which `series_dropped_total` shows with the
    reason `cap`.  Communicators are taken to be oldest first.  `pause` is called after every few hundred
    samples, about a third of a millisecond of work, for threads that must not wait until all are made.
    `selection` decides what is shown at all; the one of an agent lives as long as it, for its sums.  `earlier`: what
    agents before this one counted, which is added; None: nothing.  `labels`: those that were looked at before; None:
    each is looked at.
    """
    budget, selection, labels = budget or SeriesBudget(), selection or Selection(), labels or PrintableLabels()
    if earlier is not None:
        earlier.select_ranks(rank_pids(snapshot))
    collectives, dropped = snapshot.collectives, snapshot.health.series_dropped
    detail = Detail(collectives.communicators, collectives.peers, selection.select_rails(snapshot.rails))
    shown = _families(_drafts(snapshot, detail, selection), selection, labels, earlier, pause)
    wanted = series = _series(shown)
    allowed = budget.limit - len(dropped.keys() | {DROPPED_BY_CAP})
    # More than once only where rails share labels, and giving one up saved less than it seemed.
    lost: Counter[int | None] = Counter()
    while series > allowed and not detail.empty:
        detail, lost_now = trim(
            detail, shown, series - allowed, lambda rail, metrics: _series_of_rail(rail, metrics, selection)
        )
        lost.update(lost_now)
        shown = _families(_drafts(snapshot, detail, selection), selection, labels, earlier, pause)
        series = _series(shown)
    dropped_by_cap = dropped.get(DROPPED_BY_CAP, 0) + budget.add_dropped(wanted - series, lost)
    reasons = {**dropped, DROPPED_BY_CAP: dropped_by_cap}
    losses = [make_draft_by_label(catalogue.SERIES_DROPPED, reasons.items())]
    shown += _families(losses, selection, labels, earlier, pause)
    labels.forget_all_but(shown)
    return tuple(shown)


def _series(shown: Iterable[Family]) -> int:
    return sum(family.series() for family in shown)


def _families(
    drafts: Iterable[Draft],
    selection: Selection,
    labels: PrintableLabels,
    earlier: EarlierTotals | None = None,
    pause: Callable[[], None] = lambda: None,
) -> list[Family]:
    """The drafts that have samples, each under one label set: counters that meet are added, else the first stays."""
    made = []
    for draft in drafts:
        samples = _samples(draft, labels, pause)
        whole = _histograms(draft, labels)
        if earlier is not None:
            samples = earlier.add_to(draft.metric, samples)
            whole = earlier.add_to_histograms(draft.metric, whole)
        histograms = {
            values: histogram if selection.buckets else buckets.reduce_buckets(draft.metric, histogram)
            for values, histogram in whole.items()
        }
        if samples or histograms:
            names = draft.metric.labels + draft.more_labels
            made.append(Family(draft.metric, names, samples, tuple(histograms.items())))
    return made


def _samples(draft: Draft, labels: PrintableLabels, pause: Callable[[], None]) -> tuple[Sample, ...]:
    """One under each label set."""
    found: list[Sample] = []
    coming = iter(draft.samples)
    while batch := list(islice(coming, _SAMPLES_PER_PAUSE)):
        found += batch
        pause()
    label_sets = [values for values, _ in found]
    if labels.were_shown(draft.metric.name, label_sets):
        return tuple(found)
    by_labels: dict[LabelValues, int | float] = {}
    for start in range(0, len(found), _SAMPLES_PER_PAUSE):
        by_labels.update(found[start : start + _SAMPLES_PER_PAUSE])
        pause()
    unprintable = labels.find_unprintable(draft.metric.name, by_labels)
    # Seldom do any meet: what follows would take as long for each sample as all of the above.
    if not unprintable and len(by_labels) == len(found):
        labels.record_shown(draft.metric.name, label_sets)
        return tuple(found)
    by_labels.clear()
    for values, number in found:
        shown = make_printable(values) if values in unprintable else values  # two names may look alike
        if shown not in by_labels:
            by_labels[shown] = number
        elif draft.metric.kind == "counter":
            by_labels[shown] += number
    return tuple(by_labels.items())


def _histograms(draft: Draft, labels: PrintableLabels) -> dict[LabelValues, Histogram]:
    """Those that have buckets, the first under each label set."""
    found: dict[LabelValues, Histogram] = {}
    for values, histogram in draft.histograms:
        if histogram.counts:
            found.setdefault(values, histogram)
    unprintable = labels.find_unprintable(draft.metric.name, found)
    if not unprintable:
        return found
    shown: dict[LabelValues, Histogram] = {}
    for values, histogram in found.items():
        shown.setdefault(make_printable(values) if values in unprintable else values, histogram)
    return shown


def _drafts(snapshot: Snapshot, detail: Detail, selection: Selection) -> Iterator[Draft]:
    """Every family but `series_dropped_total`, of ranks those that the budget leaves."""
    gone = detail.ranks_gone
    for draft in _all_drafts(snapshot, detail, selection):
        if gone and goes_with_rank(draft.metric):
            samples = [sample for sample in draft.samples if sample[0][:2] not in gone]
            yield Draft(draft.metric, samples, [one for one in draft.histograms if one[0][:2] not in gone])
        else:
            yield draft


def _all_drafts(snapshot: Snapshot, detail: Detail, selection: Selection) -> Iterator[Draft]:
    yield from _about_railscope(snapshot)
    yield from _collectives(snapshot.collectives)
    yield from _communicators(detail.communicators)
    yield from _stalls(snapshot.stalls, snapshot.monotonic_ns, snapshot.collectives)
    yield from transfer_families(snapshot.transfers, snapshot.stalls.current, snapshot.monotonic_ns)
    yield from _times(snapshot.collectives, detail)
    yield from _jobs(snapshot.collectives.jobs)
    yield make_draft_by_label(catalogue.COMM_EVENTS, snapshot.collectives.events.items())
    yield make_draft_by_label(catalogue.COMM_ERRORS, snapshot.collectives.errors.items())
    yield from _failovers(snapshot)
    yield make_draft(catalogue.COMM_IDENTITY_CONFLICTS, [((), snapshot.collectives.identity_conflicts)])
    yield from rail_families(detail.rails, selection)
    yield from gpu_families(snapshot.gpus, selection)
    yield from condition_families(snapshot.condition)
    yield from fabric_families(snapshot.fabric)
    yield from _probes(snapshot.health.probes)
    yield from _collectors(snapshot.health)


def _about_railscope(snapshot: Snapshot) -> Iterator[Draft]:
    build = (snapshot.version, snapshot.revision, snapshot.kernel, "true" if snapshot.simulated else "false")
    yield Draft(catalogue.BUILD_INFO, [(build, 1)])
    if snapshot.node.hostname:
        # An empty label would take the place of the target's own with honor_labels.
        cluster = snapshot.node.cluster
        node = (snapshot.node.name, snapshot.node.hostname, *([cluster] if cluster else []))
        yield Draft(catalogue.NODE_INFO, [(node, 1)], more_labels=("cluster",) if cluster else ())
    health = snapshot.health
    if health.started_realtime_ns:
        yield Draft(catalogue.AGENT_START_TIME, [((), health.started_realtime_ns / 1_000_000_000)])
    if health.dark_seconds is not None:
        yield Draft(catalogue.AGENT_DARK_SECONDS, [((), health.dark_seconds)])
    if health.loop is not None:
        yield Draft(catalogue.LOOP_LATE, [((), health.loop.late_seconds)])
        yield Draft(catalogue.LOOP_LATE_RECENT, [((), health.loop.late_recent_seconds)])
    yield Draft(catalogue.SNAPSHOT_TIMESTAMP, [((), snapshot.realtime_ns / 1_000_000_000)])
    yield Draft(catalogue.PROCESSES_OBSERVED, [((), health.probes.processes_observed)])
    if (own := health.own_process) is not None:
        yield Draft(catalogue.PROCESS_CPU, [((), own.cpu_seconds)])
        yield Draft(catalogue.PROCESS_RESIDENT, [((), own.resident_bytes)])
        yield Draft(catalogue.PROCESS_VIRTUAL, [((), own.virtual_bytes)])
        yield Draft(catalogue.PROCESS_OPEN_FDS, [((), own.open_descriptors)])
        yield Draft(catalogue.PROCESS_MAX_FDS, [((), own.most_descriptors)])
        yield Draft(catalogue.PROCESS_START_TIME, [((), own.start_seconds)])


def _collectives(collectives: NodeCollectives) -> Iterator[Draft]:
    totals, completion = collectives.totals, collectives.completion
    yield Draft(catalogue.COLLECTIVE_CALLS, (((one.op, one.dtype, one.gpu), one.calls) for one in totals))
    yield Draft(
        catalogue.COLLECTIVE_PAYLOAD_BYTES, (((one.op, one.dtype, one.gpu), one.payload_bytes) for one in totals)
    )
    estimated = collectives.estimated
    yield Draft(catalogue.COLLECTIVE_ESTIMATED_CALLS, (((one.op,), one.calls) for one in estimated))
    yield Draft(
        catalogue.COLLECTIVE_ESTIMATED_PAYLOAD_BYTES,
        (((one.op,), one.payload_bytes) for one in estimated if one.payload_bytes is not None),
    )
    yield Draft(
        catalogue.COLLECTIVE_ESTIMATED_PAYLOAD_ERROR,
        (((one.op,), one.payload_error_ratio) for one in estimated if one.payload_error_ratio is not None),
    )
    yield Draft(catalogue.COLLECTIVE_SIZE_BYTES, histograms=(((one.op,), one.histogram) for one in collectives.sizes))
    yield Draft(
        catalogue.COLLECTIVE_ENQUEUE_SECONDS,
        histograms=(((one.op,), one.histogram) for one in collectives.enqueue_times),
    )
    yield Draft(
        catalogue.COLLECTIVE_DURATION_SECONDS,
        histograms=(
            ((one.op, source), one.histogram)
            for source, measured in (("proxy", completion.durations), ("cuda", completion.cuda_durations))
            for one in measured
        ),
    )
    yield Draft(
        catalogue.COLLECTIVE_BUS_BANDWIDTH, histograms=(((one.op,), one.histogram) for one in completion.bandwidths)
    )
    yield Draft(
        catalogue.COLLECTIVE_LAUNCHES,
        (((one.op, one.algorithm, one.protocol, str(one.channels)), one.launches) for one in completion.launches),
    )


def _communicators(communicators: tuple[CommunicatorFacts, ...]) -> Iterator[Draft]:
    # Every sample of comm_info has every job label, or a join on one of them would lose the others.
    identities = [one.identity for one in communicators]
    label_of = _job_label_names(identities)
    job_labels = tuple(dict.fromkeys(label_of.values()))
    values_of: dict[Labels, tuple[str, ...]] = {}

    def info(one: RankIdentity) -> LabelValues:
        job_values = values_of.get(one.job)
        if job_values is None:
            job = {label_of[name]: value for name, value in one.job if name in label_of}
            job_values = values_of[one.job] = tuple(job.get(label, "") for label in job_labels)
        return (  # in the order of COMM_INFO.labels
            one.comm,
            one.rank,
            one.nranks,
            one.gpu,
            one.gpu_uuid,
            one.pci_bus_id,
            one.node_rank,
            one.local_ranks,
            one.nccl_version,
            str(one.pid),
            one.netns,
            one.identity_source,
            *job_values,
        )

    yield Draft(catalogue.COMM_INFO, ((info(one), 1) for one in identities), more_labels=job_labels)
    ranks = [(one.identity.key, one) for one in communicators]
    yield Draft(catalogue.COMM_ENQUEUED, ((rank, one.enqueued) for rank, one in ranks))
    yield Draft(catalogue.COMM_ESTIMATED, ((rank, one.estimated) for rank, one in ranks if one.estimated))
    yield Draft(catalogue.COMM_COUNTED_FROM_START, ((rank, 0) for rank, one in ranks if not one.whole))
    living = {rank for rank, one in ranks if one.alive}
    # A name that is not known may be another communicator's, and where jobs fix NCCL's id the next one has the same.
    ended = (rank for rank, _ in ranks if rank not in living and UNKNOWN not in rank)
    yield Draft(catalogue.COMM_ENDED, ((rank, 1) for rank in ended))
    yield Draft(catalogue.COMM_SEQUENCE, ((rank, one.position) for rank, one in ranks if one.position is not None))
    yield Draft(catalogue.COMM_SIGNATURE, ((rank, one.signature) for rank, one in ranks if one.signature is not None))
    yield Draft(catalogue.COMM_COMPLETED, ((rank, one.completed) for rank, one in ranks if one.completed is not None))
    seen = [(rank, one) for rank, one in ranks if one.completed is not None]
    yield Draft(
        catalogue.COMM_INFLIGHT_SECONDS,
        ((rank, one.inflight_seconds) for rank, one in seen if one.alive and one.inflight_seconds is not None),
    )
    # Only where graphs are used, so that most jobs have no series for them.
    yield Draft(catalogue.COMM_CAPTURED, ((rank, one.captured) for rank, one in seen if one.captured))
    yield Draft(catalogue.COMM_REPLAYED, ((rank, one.replayed) for rank, one in seen if one.replayed))


def _failovers(snapshot: Snapshot) -> Iterator[Draft]:
    collectives = snapshot.collectives
    if collectives.failed_over is not None:
        yield make_draft_by_label(catalogue.COMM_FAILED_OVER, collectives.failed_over.items())
    rails = {(one.device, one.port): one.rail for one in snapshot.rails}
    yield Draft(
        catalogue.COMM_DEGRADED,
        [
            (
                (
                    *(one.comm, one.rank, rails.get((one.device, one.port), ""), one.device, one.port),
                    *(one.carried_by, one.status, f"{one.vendor_error:#x}"),
                ),
                one.connections,
            )
            for one in collectives.degraded
        ],
    )


def _job_label_names(identities: Iterable[RankIdentity]) -> dict[str, str]:
    """The label that shows each fact of a job, by the fact's name, in the order of the labels.

    Names come from the environment of other people's processes: what Prometheus does not take in a label's name
    becomes `_`, and a fact named as one of ours is left out.
    """
    taken = frozenset(catalogue.COMM_INFO.labels)
    shown = {}
    names = {name for one in identities for name, _ in one.job}
    for name in sorted(names):
        label = _LABELS.get(name) or _NOT_IN_LABEL_NAME.sub("_", name).lstrip("_")
        if label and label[0].isdigit():
            label = f"job_{label}"
        if label and label not in taken:
            shown[name] = label
    return shown


def _stalls(stalls: NodeStalls, now_ns: int, collectives: NodeCollectives) -> Iterator[Draft]:
    current = stalls.current
    identities = {one.identity.key: one.identity for one in collectives.communicators}
    yield Draft(
        catalogue.COMM_STALLED,
        [((stall.comm, stall.rank, stall.op, stall.diagnosis.cause.value), 1) for stall in current],
    )
    yield Draft(
        catalogue.COMM_STALL_INFO,
        [
            (
                (
                    stall.comm,
                    stall.rank,
                    stall.diagnosis.cause.value,
                    stall.strength,
                    "" if stall.diagnosis.blamed_rank is None else str(stall.diagnosis.blamed_rank),
                    stall.diagnosis.rail,
                    stall.diagnosis.device,
                    stall.diagnosis.netns,
                    *_gpu_labels(identities.get((stall.comm, stall.rank))),
                ),
                1,
            )
            for stall in current
        ],
    )
    yield Draft(
        catalogue.CALL_INSIDE_SECONDS,
        [
            ((stall.op, stall.comm, stall.rank, stall.nranks, str(stall.pid)), stall.length_ns(now_ns) / 1e9)
            for stall in current
            if stall.is_call
        ],
    )
    yield Draft(catalogue.CUDA_GRAPH_LAUNCHES, (((str(one.pid),), one.graph_launches) for one in stalls.driver_calls))
    yield Draft(
        catalogue.CUDA_INSIDE_SECONDS,
        (((str(one.pid), one.inside), one.inside_seconds) for one in stalls.driver_calls if one.inside),
    )
    yield Draft(
        catalogue.COMM_STALL_COLLECTIVES,
        [((*key, format_shapes(last.shapes)), last.last) for key, last in _last_collectives(stalls, collectives)],
    )
    yield Draft(
        catalogue.PROCESS_WITHOUT_COMM,
        (((str(one.pid), one.job, one.world_rank, one.world_size), 1) for one in collectives.unjoined),
    )
    yield Draft(
        catalogue.COMM_STALL_SECONDS, [((one.comm, one.rank, one.cause), one.seconds) for one in stalls.lengths]
    )
    yield Draft(catalogue.COMM_WRITING, ((key, 1) for key in stalls.writing))
    yield Draft(catalogue.COMM_AWAITED, [((one.comm, one.rank), one.waited_ratio) for one in stalls.slow])
    yield Draft(catalogue.COMM_AWAITED_SINCE, [((one.comm, one.rank), one.slowness.since) for one in stalls.slow])
    yield Draft(catalogue.STALLS, [((one.op, one.cause), one.count) for one in stalls.totals])


def _gpu_labels(identity: RankIdentity | None) -> tuple[str, str, str]:
    return (UNKNOWN,) * 3 if identity is None else (identity.gpu, identity.gpu_uuid, identity.pci_bus_id)


def _last_collectives(
    stalls: NodeStalls, collectives: NodeCollectives
) -> Iterable[tuple[RankKey, LastCollectives[str]]]:
    """Of ranks that stall, and of those that have left others alone."""
    # Where jobs fix NCCL's id, a later job's rank has the name of one that has left.
    living = {one.identity.key for one in collectives.communicators if one.alive}
    left = {one.identity.key: one.last for one in collectives.communicators if one.last is not None}
    return ({key: last for key, last in left.items() if key not in living} | dict(stalls.last)).items()


def _times(collectives: NodeCollectives, detail: Detail) -> Iterator[Draft]:
    # Families of the same ranks share the tuples of their labels: there are thousands.
    times = [((one.comm, one.rank), one) for one in collectives.times.by_rank]
    yield Draft(catalogue.COMM_OPERATION_SECONDS, ((rank, one.seconds) for rank, one in times))
    yield Draft(catalogue.COMM_OPERATIONS, ((rank, one.operations) for rank, one in times))
    arrivals = [((one.comm, one.rank), one) for one in collectives.times.arrivals]
    yield Draft(catalogue.COMM_LAST_ARRIVALS, ((rank, one.last) for rank, one in arrivals))
    yield Draft(catalogue.COMM_ARRIVAL_LAG_SECONDS, ((rank, one.lag_seconds) for rank, one in arrivals))
    yield Draft(
        catalogue.COMM_PEER_WIRE_BYTES,
        (((one.comm, one.rank, one.peer, one.basis), one.wire_bytes) for one in detail.peers),
    )
    kinds = [((one.op, str(one.size_bytes)), one) for one in collectives.times.by_size]
    yield Draft(catalogue.COLLECTIVE_COMPLETED_PAYLOAD_BYTES, ((labels, one.payload_bytes) for labels, one in kinds))
    yield Draft(catalogue.COLLECTIVE_COMPLETED_BUS_BYTES, ((labels, one.bus_bytes) for labels, one in kinds))
    yield Draft(catalogue.COLLECTIVE_COMPLETED_SECONDS, ((labels, one.seconds) for labels, one in kinds))


def _jobs(jobs: tuple[JobSteps, ...]) -> Iterator[Draft]:
    ranks = [((one.comm, one.rank), one) for one in jobs]
    yield Draft(catalogue.JOB_STEPS, ((rank, one.steps) for rank, one in ranks))
    yield Draft(catalogue.JOB_STEP_SECONDS, histograms=((rank, one.lengths) for rank, one in ranks))
    yield Draft(catalogue.JOB_STEP_SILENT_SECONDS, ((rank, one.silent_seconds) for rank, one in ranks))
    yield Draft(
        catalogue.JOB_STEP_PART_SECONDS,
        (((*rank, part), seconds) for rank, one in ranks for part, seconds in one.parts.items()),
    )
    yield Draft(
        catalogue.JOB_TIME_SECONDS,
        (((*rank, state), seconds) for rank, one in ranks for state, seconds in one.spent.items()),
    )


def _probes(probes: ProbeHealth) -> Iterator[Draft]:
    yield Draft(
        catalogue.PROBE_ATTACHED,
        (((one.library, one.nccl_version, one.program), int(one.attached)) for one in probes.attached),
    )
    yield Draft(catalogue.PROBE_LEVEL, (((one.library, one.nccl_version), one.level) for one in probes.levels))
    yield Draft(
        catalogue.PROBE_LAYOUT_INFO,
        (((one.library, one.nccl_version, one.layout_source), 1) for one in probes.attached),
    )
    yield Draft(catalogue.OVERHEAD_SECONDS, (((program,), value) for program, value in probes.overhead_seconds.items()))


def _collectors(health: AgentHealth) -> Iterator[Draft]:
    yield Draft(catalogue.COLLECTOR_SUCCESS, (((one.collector,), int(one.success)) for one in health.collectors))
    yield Draft(catalogue.COLLECTOR_DURATION, (((one.collector,), one.duration_seconds) for one in health.collectors))
    yield make_draft(
        catalogue.COLLECTOR_READS_MISSED, (((one.collector,), one.reads_missed) for one in health.collectors)
    )
    yield Draft(catalogue.EVENTS_LOST, (((reason,), value) for reason, value in health.probes.events_lost.items()))
    yield make_draft(catalogue.LIMIT_REACHED, health.probes.limits_reached.items())
    yield Draft(catalogue.RECORDINGS, health.recordings.items())
    yield Draft(catalogue.HTTP_REFUSED, (((reason,), value) for reason, value in health.http_refused.items() if value))
    yield Draft(catalogue.OTLP_EXPORTS, (((result,), count) for result, count in health.otlp_exports.items()))


def _series_of_rail(rail: RailFacts, metrics: Collection[Metric] | None, selection: Selection) -> int:
    drafts = (draft for draft in rail_families((rail,), selection) if metrics is None or draft.metric in metrics)
    return _series(_families(drafts, selection, PrintableLabels()))
