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

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Final

from railscope.agent.analysis.compare.compare import iteration_value
from railscope.agent.analysis.compare.figures import Compared, Side, Unit, Value, compare_values
from railscope.agent.analysis.pictures.pictures import ROLE_NAMES
from railscope.agent.estimate.answer import Estimate
from railscope.agent.model.volumes import stage_volumes

_ROLES: Final = {"tp": ("tp", "loss"), "pp": ("pp_send",), "dp": ("dp",), "embedding": ("embedding_sync",)}
"""The model's volumes of each role's payload; what is received was sent."""
_RECEIVED: Final = "pp_recv"
"""Calls of the pipeline, too."""


def compare_with_estimate(side: Side, estimate: Estimate, name: str) -> Compared:
    """A recording against an estimate that is called `name`."""
    shape = estimate.request.shape
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
            f"The estimate is of {shape.ranks} ranks, and {len(side.report.gpus)} GPUs were recorded: volumes and "
            "pairs are not compared.  Record all of the job."
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
        volumes = [getattr(stage, name) for stage in stages for name in sent]
        called = volumes + ([getattr(stage, _RECEIVED) for stage in stages] if role == "pp" else [])
        name = ROLE_NAMES[role]
        payload = sum(volume.bytes for volume in volumes) * ranks
        yield Value(7, f"{name} payload of all ranks", Unit.BYTES, payload)
        yield Value(7, f"{name} calls of all ranks", Unit.COUNT, float(sum(one.messages for one in called) * ranks))
    flows, nodes = estimate.traffic, estimate.nodes
    yield Value(8, "pairs that talk", Unit.COUNT, flows.pair_count)
    yield Value(8, "wire bytes between GPUs", Unit.BYTES, flows.total_bytes)
    yield Value(8, "wire bytes between servers", Unit.BYTES, nodes.inter_node_bytes(flows))
    yield Value(8, "wire bytes across rails", Unit.BYTES, nodes.cross_rail_bytes(flows))
