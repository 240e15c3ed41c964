"""Reports made up from the model (simulated): what a GPT-shaped job would show, without a recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from railscope.agent.analysis.facts.fact_columns import Pairs, Sizes, SizeUse
from railscope.agent.analysis.facts.report import (
    Anomaly,
    BandwidthRow,
    CommunicatorUse,
    Composition,
    GpuFacts,
    Iteration,
    Latency,
    LatencyRow,
    NonUniformity,
    OpUse,
    Parallelism,
    ReceiveUse,
    Regularity,
    Report,
    Role,
    Scaling,
    Traffic,
    Unknown,
)
from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Mode, Shape
from railscope.agent.model.traffic import estimate_traffic
from railscope.agent.model.volumes import stage_volumes

BEGAN = 1_790_000_000.0


def observed(shape: Shape, gpus_per_server: int = 8, iterations: int = 1) -> Traffic:
    """The model's traffic as if it had been recorded."""
    sources, destinations, moved = estimate_traffic(shape, default_mapping(shape)).pairs()
    moved = moved * iterations
    server = np.arange(shape.ranks) // gpus_per_server
    leaving = server[sources] != server[destinations]
    rail = np.arange(shape.ranks) % gpus_per_server
    names = [f"gpu-node-{number}" for number in range(int(server[-1]) + 1)]
    return Traffic(
        gpus=shape.ranks,
        pairs=Pairs(sources, destinations, moved),
        sparsity=len(moved) / (shape.ranks * (shape.ranks - 1)),
        unobserved_wire_bytes=0,
        unmodelled_calls=0,
        between_servers_wire_bytes=int(moved[leaving].sum()),
        cross_rail_wire_bytes=int(moved[leaving & (rail[sources] != rail[destinations])].sum()),
        spine_wire_bytes=None,
        server_transmit_wire_bytes=tuple(
            (name, int(moved[leaving & (server[sources] == number)].sum())) for number, name in enumerate(names)
        ),
        basis="Rings in the order of ranks.",
    )


def report_of_shape(shape: Shape, gpus_per_server: int = 8, iterations: int = 40, seed: int = 1) -> Report:
    """A complete report of some iterations of a job, with noise that a seed decides."""
    noise = np.random.default_rng(seed)
    volumes = [stage_volumes(shape, Mode.EXACT, stage) for stage in range(shape.pipeline)]
    replicas = shape.tensor * shape.data
    roles = []
    for role, name in (("tp", "tp"), ("pp", "pp_send"), ("dp", "dp"), ("embedding", "embedding_sync")):
        own = [getattr(volume, name) for volume in volumes if getattr(volume, name).messages]
        calls = sum(int(volume.messages) for volume in own) * replicas * iterations
        payload = sum(volume.bytes for volume in own) * replicas * iterations
        ranks = max(len(own) * replicas, 1)
        if own:
            roles.append(Role(role, max(ranks // 4, 1), calls, payload, calls / ranks, payload / ranks))
    first = volumes[0]
    tp_bytes, dp_bytes = first.tp.message_bytes, first.dp.message_bytes
    ops = (
        OpUse("AllReduce", "Bfloat16", sum(role.calls for role in roles if role.role != "pp"), 10**13),
        OpUse("Send", "Bfloat16", 4096, 4096 * tp_bytes),
        OpUse("Recv", "Bfloat16", 4096, 4096 * tp_bytes),
    )
    series = []
    start = BEGAN
    for _ in range(iterations):
        period = float(66.4 * noise.lognormal(0, 0.02))
        comm = period * float(noise.normal(0.23, 0.01))
        spread = float(noise.normal(1.2, 0.2))
        series.append(
            Iteration(
                start, period, comm, comm / period, comm * 0.6, comm * 0.6 / period,
                NonUniformity(int(spread * 10**6), 1 + spread, spread, 10**8),
            )
        )  # fmt: skip
        start += period
    return Report(
        folders=("/recordings/gpt-3b",),
        simulated=True,
        began_seconds=BEGAN,
        seconds=start - BEGAN,
        gpus=tuple(
            GpuFacts(rank, f"gpu-node-{rank // gpus_per_server}", 1000 + rank, str(rank % gpus_per_server), rank, "")
            for rank in range(shape.ranks)
        ),
        ops=ops,
        sizes=Sizes.from_uses(
            [
                *(SizeUse("AllReduce", size, calls) for size, calls in ((8, 300), (tp_bytes, 27_200), (dp_bytes, 40))),
                *(SizeUse(op, tp_bytes, 4096) for op in ("Send", "Recv")),
            ]
        ),
        communicators=(
            CommunicatorUse("8f3ac1d200117e55", shape.tensor, (0, 1), "tp", 27_200, 27_200 * tp_bytes, ops[:1]),
            CommunicatorUse("11bb03c9aa20f7d1", shape.data, (0, 2, 4, 6), "dp", 160, 160 * dp_bytes, ops[:1]),
        ),
        matrix=observed(shape, gpus_per_server, iterations),
        latency=Latency(
            rows=tuple(
                LatencyRow(op, size, "proxy", count, p50, 1.2 * p50, 2.5 * p50, longest * p50)
                for op, size, count, p50, longest in (
                    ("AllReduce", 8, 300, 21e-6, 3),
                    ("AllReduce", tp_bytes, 27_200, 8e-3, 400),
                    ("AllReduce", dp_bytes, 40, 0.8, 1.6),
                    ("Send", tp_bytes, 4096, 26e-3, 90),
                    ("Recv", tp_bytes, 4096, 31e-3, 2),
                )
            ),
            anomalies=(
                Anomaly(BEGAN + 61, "8f3ac1d200117e55", 1, "AllReduce", tp_bytes, 3.2, 8e-3, "link_down"),
                Anomaly(BEGAN + 99, "8f3ac1d200117e55", 0, "Send", tp_bytes, 2.3, 26e-3, ""),
            ),
            anomaly_count=2,
        ),
        composition=Composition(
            tuple(roles),
            Parallelism(
                shape.pipeline, shape.tensor, shape.data, 1, True, "every communicator is a line of the grid of ranks."
            ),
        ),
        regularity=Regularity(66.4, 0.81, 0.975, iterations, 27_840),
        iterations=tuple(series),
        bandwidth=tuple(
            BandwidthRow(op, 1 << power, 100, 45e9 * part, 45e9 * part * 1.75, part)
            for op, factor in (("AllReduce", 1.0), ("AllGather", 0.8))
            for power in range(10, 31, 2)
            for part in (factor * (1 << power) / ((1 << power) + (1 << 23)),)
        ),
        scaling=(
            Scaling("8gpus", 8, 0.0151, None, 1.0, 1.0, 1.0),
            Scaling("32gpus", 32, 0.014, "weak", 0.926, 0.926, 0.2315),
        ),
        receives=tuple(
            ReceiveUse(gpu, 12.0 + gpu % 3, 8.0 * (3 - gpu // 8) + 4, 0.1 * (3 - gpu // 8) + 0.02)
            for gpu in range(shape.ranks)
        ),
        unknown=(
            Unknown(5, "Spine traffic needs the leaf switch of each server: give --leaf-map FILE."),
            Unknown(
                8,
                "A prediction needs the job's shape: 'railscope matrix --estimate' shows it beside the observed "
                "matrix.",
            ),
        ),
        losses=("12 calls were observed and not recorded: counts and bytes are too small by them (on gpu-node-2).",),
    )


def with_names(report: Report, name: str) -> Report:
    """The report with this text wherever a recording can put a text of its own."""
    return replace(
        report,
        folders=(name,),
        gpus=tuple(replace(gpu, server=name, gpu=name, rail=name) for gpu in report.gpus),
        ops=tuple(replace(use, op=name, dtype=name) for use in report.ops),
        sizes=Sizes.from_uses(replace(use, op=name) for use in report.sizes),
        communicators=tuple(replace(use, comm=name, role=name) for use in report.communicators),
        matrix=replace(report.matrix, basis=name, server_transmit_wire_bytes=((name, 1), (name + "2", 2))),
        latency=replace(
            report.latency,
            rows=tuple(replace(row, op=name, source=name) for row in report.latency.rows),
            anomalies=tuple(replace(one, comm=name, op=name, cause=name) for one in report.latency.anomalies),
        ),
        composition=replace(
            report.composition,
            roles=tuple(replace(role, role=name) for role in report.composition.roles),
            parallelism=None
            if report.composition.parallelism is None
            else replace(report.composition.parallelism, reason=name),
        ),
        bandwidth=tuple(replace(row, op=name) for row in report.bandwidth),
        scaling=tuple(replace(one, name=name) for one in report.scaling),
        unknown=tuple(replace(one, reason=name) for one in report.unknown),
        losses=(name,),
    )
