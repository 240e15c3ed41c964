"""Compares a recording with the model: the model's accuracy against measured values.

| Figure            | Measured (A)                                               | Predicted (B)               |
|-------------------|------------------------------------------------------------|-----------------------------|
| payload of a role | of all recorded ranks' calls, by iteration                 | of all stages × their ranks |
| pairs, wire bytes | the recording's matrix, by iteration                       | the model's, by equal rules |
| T_iter            | median length of an iteration                              | equation 1                  |
| T_comm            | median union of communication intervals, with the waiting  | T_TP + T_PP + T_DP          |
| R_comm            | median of the same / the iteration's length                | T_comm / T_iter             |
| T_comp            | median union of the kernels that are no communication      | equation 5                  |
| R_bubble          | mean of GPUs' idle receives / the iterations' time         | T_bubble / T_iter           |

T_comp and R_bubble need recorded kernels and timed receives.  A GPU that waits for data or for its host neither
computes nor communicates, which is in no figure of the model.  Measured communication holds what the model counts as
bubble wherever a rank waits inside a call; with a pipeline, T_comm is therefore an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from railscope.agent.analysis.compare.compare import iteration_value
from railscope.agent.analysis.compare.figures import Compared, Side, Unit, Value, compare_values
from railscope.agent.analysis.facts.quantities import format_bytes
from railscope.agent.analysis.pictures.pictures import ROLE_NAMES
from railscope.agent.estimate.answer import Estimate
from railscope.agent.facts.counted import format_count
from railscope.agent.model.volumes import Volume, stage_volumes

_ROLES: Final = {"tp": ("tp", "loss"), "pp": ("pp_send",), "dp": ("dp",), "embedding": ("embedding_sync",)}
"""The model's volumes of each role's payload; what is received was sent."""
_OTHER: Final = 4
"""Times as much: data types, recomputation and padding change less than that."""
_RECEIVED: Final = "pp_recv"
"""Calls of the pipeline, too."""


class UnlikeJobs(ValueError):
    """The recording is of another job than the estimate: their figures say nothing of each other."""


def why_unlike(side: Side, estimate: Estimate) -> str:
    """Why the recording cannot be of the job that was estimated, the end of a sentence; empty: it may be."""
    shape, report = estimate.request.shape, side.report
    recorded, largest = len(report.gpus), max((use.nranks or 0 for use in report.communicators), default=0)
    whole = bool(report.communicators) and all(use.nranks == len(use.gpus) for use in report.communicators)
    if max(recorded, largest) > shape.ranks or (whole and recorded < shape.ranks):
        return f"it has {format_count(max(recorded, largest), 'rank')}, and the estimate is of {shape.ranks:,}"
    found = report.composition.parallelism
    seen = None if found is None else (found.pipeline, found.tensor, found.data)
    told = (shape.pipeline, shape.tensor, shape.data)
    if found is not None and found.certain and recorded == shape.ranks and seen != told:
        return f"it is pipeline × tensor × data {_product(seen)}, and the estimate is of {_product(told)}"
    if recorded != shape.ranks or side.iterations is None:
        return ""
    sent = {role.role: role.payload_bytes / side.iterations for role in side.composition.roles}
    # Sharded collectives hand over one rank's part, where the model has the whole.
    for role, shards in (("pp", 1), ("tp", shape.tensor), ("dp", shape.data)):
        predicted, measured = _predicted_payload(estimate, role), sent.get(role, 0)
        if predicted and measured and not 1 / (_OTHER * shards) <= measured / predicted <= _OTHER * shards:
            return (
                f"its {ROLE_NAMES[role]} payload an iteration is {format_bytes(measured)}, and the estimate's "
                f"{format_bytes(predicted)}"
            )
    return ""


def _product(sizes: Sequence[int] | None) -> str:
    return " × ".join(map(str, sizes or ()))


def _predicted_payload(estimate: Estimate, role: str) -> int:
    """Of all ranks in an iteration."""
    shape = estimate.request.shape
    stages = [stage_volumes(shape, estimate.request.mode, stage) for stage in range(shape.pipeline)]
    volumes: list[Volume] = [getattr(stage, name) for stage in stages for name in _ROLES[role]]
    return sum(volume.bytes for volume in volumes) * shape.tensor * shape.data


def compare_with_estimate(side: Side, estimate: Estimate, name: str) -> Compared:
    """A recording against an estimate that is called `name`.

    Raises:
        UnlikeJobs: it is the estimate of another job.
    """
    shape = estimate.request.shape
    if reason := why_unlike(side, estimate):
        raise UnlikeJobs(
            f"{side.name} is not the job that {name} describes: {reason}; give the estimate of its own job"
        )
    caveats = [f"{side.name}: {note}" for note in side.notes]
    notes = []
    if estimate.assumed:
        notes.append(
            f"Assumed, and not given: {', '.join(sorted(estimate.assumed)).replace('_', ' ')}; predicted times depend "
            "on them."
        )
    whole = len(side.report.gpus) == shape.ranks
    if not whole:
        caveats.append(
            f"The estimate is of {format_count(shape.ranks, 'rank')}, and {format_count(len(side.report.gpus), 'GPU')} "
            f"{'was' if len(side.report.gpus) == 1 else 'were'} recorded: volumes and pairs are not compared.  Record "
            "all "
            "of the job."
        )
    elif not side.has_calls:
        caveats.append("No call was recorded, so the job's traffic is unknown: volumes and pairs are not compared.")
    elif side.iterations is None:
        caveats.append("No iterations were found, so volumes are not compared: give their number with --iterations N.")
    measured, predicted = list(_measured_times(side)), list(_predicted_times(estimate))
    if whole and side.has_calls and side.iterations is not None:
        measured += _measured_volumes(side, side.iterations)
        predicted += _predicted_volumes(estimate)
    if shape.pipeline > 1 and any(one.comm_seconds is not None for one in side.report.iterations):
        notes.append("Measured communication holds the waiting inside calls, which the model counts as bubble.")
    notes += [f"Not known: {unknown.reason}" for unknown in side.report.unknown if unknown.row in (9, 11, 12, 16)]
    # The model has no figure that varies.
    return Compared(
        a=side.name,
        b=name,
        predicted=True,
        simulated=side.report.simulated,
        figures=compare_values([replace(value, samples=None) for value in measured], predicted, predicted=True),
        notes=tuple(dict.fromkeys(notes)),
        caveats=tuple(dict.fromkeys(caveats)),
    )


def _measured_times(side: Side) -> Iterator[Value]:
    iterations = side.report.iterations
    yield iteration_value(17, "T_iter", Unit.SECONDS, iterations, lambda one: one.period_seconds)
    yield iteration_value(17, "T_comm", Unit.SECONDS, iterations, lambda one: one.comm_seconds)
    yield iteration_value(17, "R_comm", Unit.SHARE, iterations, lambda one: one.comm_ratio)
    yield iteration_value(17, "T_comp", Unit.SECONDS, iterations, lambda one: one.compute_seconds)
    ratios = [use.bubble_ratio for use in side.report.receives if use.bubble_ratio is not None]
    yield Value(17, "R_bubble", Unit.SHARE, fmean(ratios) if ratios else None)


def _predicted_times(estimate: Estimate) -> Iterator[Value]:
    times = estimate.times
    yield Value(17, "T_iter", Unit.SECONDS, times.t_iter)
    yield Value(17, "T_comm", Unit.SECONDS, times.t_tp + times.t_pp + times.t_dp)
    yield Value(17, "R_comm", Unit.SHARE, times.r_comm)
    yield Value(17, "T_comp", Unit.SECONDS, times.t_comp)
    yield Value(17, "R_bubble", Unit.SHARE, times.r_bubble)


def _measured_volumes(side: Side, times: int) -> Iterator[Value]:
    traffic = side.traffic
    seen = {role.role: role for role in side.composition.roles}
    for role in dict.fromkeys([*_ROLES, *seen]):
        name = ROLE_NAMES.get(role, role)
        own = seen.get(role)
        yield Value(7, f"{name} payload of all ranks", Unit.BYTES, 0 if own is None else own.payload_bytes / times)
        yield Value(7, f"{name} calls of all ranks", Unit.COUNT, 0 if own is None else own.calls / times)
    yield Value(8, "pairs that talk", Unit.COUNT, len(traffic.pairs))
    total = traffic.pairs.total_bytes
    yield Value(8, "wire bytes between GPUs", Unit.BYTES, total / times)
    yield Value(8, "wire bytes between servers", Unit.BYTES, traffic.between_servers_wire_bytes / times)
    crossing = traffic.cross_rail_wire_bytes
    yield Value(8, "wire bytes across rails", Unit.BYTES, None if crossing is None else crossing / times)


def _predicted_volumes(estimate: Estimate) -> Iterator[Value]:
    shape = estimate.request.shape
    stages = [stage_volumes(shape, estimate.request.mode, stage) for stage in range(shape.pipeline)]
    ranks = shape.tensor * shape.data
    for role, sent in _ROLES.items():
        volumes = [getattr(stage, volume) for stage in stages for volume in sent]
        called = volumes + ([getattr(stage, _RECEIVED) for stage in stages] if role == "pp" else [])
        name = ROLE_NAMES[role]
        yield Value(7, f"{name} payload of all ranks", Unit.BYTES, _predicted_payload(estimate, role))
        yield Value(7, f"{name} calls of all ranks", Unit.COUNT, float(sum(one.messages for one in called) * ranks))
    flows, nodes = estimate.traffic, estimate.nodes
    yield Value(8, "pairs that talk", Unit.COUNT, flows.pair_count)
    yield Value(8, "wire bytes between GPUs", Unit.BYTES, flows.total_bytes)
    yield Value(8, "wire bytes between servers", Unit.BYTES, nodes.inter_node_bytes(flows))
    yield Value(8, "wire bytes across rails", Unit.BYTES, nodes.cross_rail_bytes(flows))
