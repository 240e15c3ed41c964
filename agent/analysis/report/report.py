"""Builds a report: runs every analysis on one dataset and collects the results.

Each part is a module of its own; here is only the order in which they are asked, and what the recording itself says:
when, of whom, and what was lost on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from railscope.agent.analysis.facts.options import DEFAULT_MEMORY_BYTES, DUCKDB
from railscope.agent.analysis.facts.quantities import format_seconds
from railscope.agent.analysis.facts.report import Iteration, ReceiveUse, Regularity, Report, RoleTime, Unknown
from railscope.agent.analysis.parallelism.composition import find_composition
from railscope.agent.analysis.report.jobs import (
    describe_selected_job,
    describe_several_jobs,
    describe_shared_rails,
    jobs_in,
    only_job,
    with_numbers,
)
from railscope.agent.analysis.report.scaling import find_scaling, run_of, why_not_comparable
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.engines import engine
from railscope.agent.analysis.tables.gpus import Gpus, find_gpus
from railscope.agent.analysis.tables.leaf_map import LeafMap, read_leaf_map
from railscope.agent.analysis.tables.missing_calls import describe_count, describe_missing_calls, some_names
from railscope.agent.analysis.tables.size_classes import SizeClasses, find_size_classes
from railscope.agent.analysis.timing.bandwidth import find_bandwidth
from railscope.agent.analysis.timing.iterations import find_iterations
from railscope.agent.analysis.timing.latency import find_latency
from railscope.agent.analysis.timing.non_uniformity import find_non_uniformity
from railscope.agent.analysis.timing.overlap import find_overlap, find_role_times
from railscope.agent.analysis.timing.receives import find_receives
from railscope.agent.analysis.timing.waiting import find_waiting
from railscope.agent.analysis.traffic.ops import find_communicators, find_ops, unknown_of_calls
from railscope.agent.analysis.traffic.owners import find_owners
from railscope.agent.analysis.traffic.port_bytes import find_port_bytes
from railscope.agent.analysis.traffic.sizes import find_sizes
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.analysis.traffic.transfers import find_transfers
from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.facts.counted import format_count

_NS: Final = 1e9
_APART: Final = 0.1
"""Part of the whole time by which nodes' recordings may begin or end apart, as those do that somebody starts."""
_ELSEWHERE: Final = (
    Unknown(
        8, "A prediction needs the job's shape: 'railscope matrix --estimate' shows it beside the observed matrix."
    ),
    Unknown(15, "A comparison needs a second recording or an estimate: 'railscope compare A B'."),
    Unknown(17, "Accuracy needs a prediction: 'railscope compare' compares a recording with an estimate."),
)
"""What one recording alone cannot say."""


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """How a report is made."""

    leaf_map: Path | None = None
    engine: str = DUCKDB
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    """What the engine may keep in memory."""
    only: str | None = None
    """Of several jobs the one with this communicator, or of this identifier; None: all that there are."""
    scaling: str | None = None
    """Of several runs: `weak` or `strong`; None: as their recordings tell."""


_USUAL: Final = ReportOptions()


@dataclass(frozen=True, slots=True)
class _Course:
    """What rests on when things happened, and not only on how long they took."""

    regularity: Regularity | None
    iterations: tuple[Iteration, ...]
    receives: tuple[ReceiveUse, ...]
    role_times: tuple[RoleTime, ...]
    unknown: tuple[Unknown, ...]


ONLY_AN_ORDER: Final = "The imported data has no times, only an order: import data with timestamps."
_NO_COURSE: Final = _Course(None, (), (), (), tuple(Unknown(row, ONLY_AN_ORDER) for row in (9, 10, 11, 12, 16)))


def make_report(folders: Sequence[Path], options: ReportOptions = _USUAL) -> Report:
    """The report of the dataset in these folders, which are read as one: servers of one job.

    Raises:
        DatasetError: a folder is no dataset, the engine does not start, or there is no such job.
        ConfigError: the leaf map cannot be used.
    """
    leaf_map = None if options.leaf_map is None else read_leaf_map(options.leaf_map)
    with engine(options.engine, options.memory_bytes) as backend, open_dataset(folders, backend) as everything:
        dataset, gpus = everything, None
        if options.only is not None:
            dataset, gpus = only_job(everything, options.only)
        return report_of(dataset, leaf_map, gpus)


def make_runs(folders: Sequence[Path], options: ReportOptions = _USUAL) -> Report:
    """The report of the first folder, with the scaling factor of all of them: each is a run of its own.

    Raises: as `make_report`.
    """
    reports = [make_report([folder], options) for folder in folders]
    runs = [run_of(folder.name, one) for folder, one in zip(folders, reports, strict=True)]
    scaling = find_scaling(runs, options.scaling)
    unknown = [one for one in reports[0].unknown if one.row != 14]
    aperiodic = [run.name for run in runs if run.regularity is None]
    if aperiodic:
        unknown.append(Unknown(14, f"No iterations were found in {', '.join(aperiodic)}: record some of them."))
    others = {run.name: reason for run in runs if run.regularity and (reason := why_not_comparable(runs[0], run))}
    unknown += [
        Unknown(
            14,
            f"{name} is not {runs[0].name} on another number of GPUs, so its scaling factors are meaningless: {why}.",
        )
        for name, why in others.items()
    ]
    untold = [one.name for one in scaling if one.factor is None and one.name not in others]
    if untold:
        unknown.append(
            Unknown(
                14,
                f"Whether the batch of {', '.join(untold)} grew with the GPUs was not recorded, so both factors are "
                "shown: choose one with --scaling weak or --scaling strong.",
            )
        )
    return replace(reports[0], scaling=scaling, unknown=_in_order(unknown))


def has_times(report: Report) -> bool:
    """Whether a dataset's times are those of the recording; else they were made up to tell an order."""
    return not any(one.reason == ONLY_AN_ORDER for one in report.unknown)


def report_of(dataset: Dataset, leaf_map: LeafMap | None = None, gpus: Gpus | None = None) -> Report:
    """Everything that an open dataset tells; `gpus` are those of the only job that is left in it.

    Raises:
        ConfigError: the leaf map lacks a server of the dataset.
    """
    recordings = dataset.rows(dataset["recordings"]).to_pylist()
    gpus = find_gpus(dataset) if gpus is None else gpus
    counted = count_calls(dataset)
    traffic, unknown_traffic = find_traffic(dataset, gpus, counted, leaf_map)
    classes = find_size_classes(dataset)
    latency, unknown_latency = find_latency(dataset, gpus, classes=classes)
    composition, roles, unknown_composition = find_composition(dataset, gpus, counted)
    bandwidth, unknown_bandwidth = find_bandwidth(dataset, gpus, classes)
    rails, unknown_rails = find_port_bytes(dataset)
    owners, unknown_owners = find_owners(dataset, rails)
    course = _course(dataset, gpus, classes, roles) if _times_are_known(recordings) else _NO_COURSE
    began_ns, ended_ns = _span(recordings)
    missing_calls = tuple(describe_missing_calls(recordings))
    several_jobs = describe_several_jobs(jobs_in(dataset, gpus))
    found = Report(
        folders=tuple(str(folder) for folder in dataset.folders),
        simulated=any(row["simulated"] for row in recordings),
        began_seconds=began_ns / _NS,
        seconds=(ended_ns - began_ns) / _NS,
        gpus=gpus.gpus,
        ops=find_ops(counted),
        sizes=find_sizes(counted),
        communicators=find_communicators(counted, gpus, roles),
        matrix=traffic,
        latency=latency,
        composition=composition,
        regularity=course.regularity,
        iterations=course.iterations,
        bandwidth=bandwidth,
        receives=course.receives,
        role_times=course.role_times,
        waiting=find_waiting(dataset, gpus) if course.regularity is not None else None,
        rails=rails,
        owners=owners,
        transfers=find_transfers(dataset, gpus),
        unknown=_in_order(
            [
                *unknown_of_calls(counted),
                *unknown_traffic,
                *unknown_rails,
                *unknown_owners,
                *unknown_latency,
                *unknown_composition,
                *unknown_bandwidth,
                *course.unknown,
                *_unknown_of_one_run(),
            ]
        ),
        losses=tuple(_losses(recordings, missing_calls, gpus, several_jobs)),
        missing_calls=missing_calls,
        several_jobs=several_jobs,
        one_of_several=describe_selected_job(gpus),
        shared_rails=describe_shared_rails(gpus) if rails else "",
    )
    return with_numbers(found, gpus)


def _times_are_known(recordings: Iterable[dict[str, Any]]) -> bool:
    return not any(row["times_known"] is False for row in recordings)


def _course(dataset: Dataset, gpus: Gpus, classes: SizeClasses, roles: Mapping[str, str]) -> _Course:
    regularity, bare, unknown_iterations = find_iterations(dataset, gpus)
    overlap = find_overlap(dataset, gpus, bare)
    iterations, unknown_non_uniformity = find_non_uniformity(dataset, gpus, overlap.iterations)
    receives, unknown_receives = find_receives(dataset, gpus, iterations, classes)
    unknown = (*unknown_iterations, *overlap.unknown, *unknown_non_uniformity, *unknown_receives)
    role_times = find_role_times(dataset, gpus, overlap, roles)
    return _Course(regularity, iterations, receives, role_times, unknown)


def _unknown_of_one_run() -> Iterable[Unknown]:
    yield from _ELSEWHERE
    yield Unknown(14, "Scaling needs several runs: give their folders with --runs, the smallest run first.")


def _in_order(unknown: Iterable[Unknown]) -> tuple[Unknown, ...]:
    return tuple(sorted(dict.fromkeys(unknown), key=lambda one: one.row))


def _span(recordings: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """When what was recorded began and ended, ns."""
    began = [row["began_ns"] for row in recordings if row["began_ns"] is not None]
    ended = [row["ended_ns"] for row in recordings if row["ended_ns"] is not None]
    if not began or not ended:
        return 0, 0
    return min(began), max(ended)


def _losses(
    recordings: Sequence[dict[str, Any]], missing_calls: Iterable[str], gpus: Gpus, several_jobs: str
) -> Iterable[str]:
    """What is missing, and what makes figures less sure, one sentence each."""
    yield from missing_calls
    for column, what in (
        ("operations_lost", "completed operations were observed and not recorded: latencies cover the others"),
        ("operations_removed", "completed operations were removed by --max-size: latencies cover the others"),
        ("lines_skipped", "lines or events of imported data were malformed and were skipped"),
    ):
        yield from describe_count(recordings, column, what)
    for column, what in (("calls_lost", "calls"), ("operations_lost", "operations")):
        unsure = sorted({row["node"] for row in recordings if row[column] is None})
        if unsure:
            yield f"Whether {what} were lost is not known of {some_names(unsure)}."
    partial = [one for one in gpus.communicators if not one.complete]
    if partial:
        of = format_count(len(gpus.communicators), "communicator")
        yield f"{len(partial):,} of {of} {'has' if len(partial) == 1 else 'have'} ranks that were not recorded."
    twice = gpus.twice_held_ranks()
    if twice:
        named = some_names([f"rank {rank} of {comm}" for comm, rank in twice])
        yield f"Two or more GPUs claim to be {named}: only one's traffic with others is shown."
    if several_jobs:
        yield several_jobs
    if _times_are_known(recordings):
        yield from _different_windows(recordings)


def _different_windows(recordings: Iterable[dict[str, Any]]) -> Iterable[str]:
    by_node: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in recordings:
        if row["began_ns"] is not None and row["ended_ns"] is not None:
            by_node[row["node"]].append(row)
    windows = {node: _span(rows) for node, rows in by_node.items()}
    if len(windows) < 2:
        return
    began, ended = zip(*windows.values(), strict=True)
    apart_ns = max(max(began) - min(began), max(ended) - min(ended))
    if apart_ns <= _APART * (max(ended) - min(began)):
        return
    lengths = sorted(((to - since) / _NS, node) for node, (since, to) in windows.items())
    (shortest, short), (longest, long) = lengths[0], lengths[-1]
    others = f" (the longest and the shortest of {len(lengths):,} nodes)" if len(lengths) > 2 else ""
    yield (
        f"{long} was recorded {format_seconds(longest)}, {short} {format_seconds(shortest)}{others}, up to "
        f"{format_seconds(apart_ns / _NS)} apart: figures that need several nodes combine different times."
    )
