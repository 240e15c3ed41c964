"""The estimate as text for people: what a rank sends, to whom, what leaves the nodes, how long it takes."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from itertools import groupby
from typing import Final

import numpy as np

from railscope.agent.estimate.answer import Estimate
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.text_tables import format_table
from railscope.agent.model.parameters import rank_parameters, total_parameters
from railscope.agent.model.shape import Mode, Shape
from railscope.agent.model.times import r_bubble_without_dp
from railscope.agent.model.traffic import Kind
from railscope.agent.model.volumes import StageVolumes

_UNITS: Final = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40), ("PiB", 1 << 50))
_PREFIXES: Final = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15))
_TIME_UNITS: Final = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_MOST_NODES_SHOWN: Final = 16


def as_text(estimate: Estimate) -> str:
    """The estimate as tables with a heading each; the units are chosen for each figure."""
    parts = (_job(estimate), _volumes(estimate), _pairs(estimate), _between_nodes(estimate), _times(estimate))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def format_bytes(count: int) -> str:
    """Bytes of an estimate, `83.008 GiB`: the largest unit that the count reaches."""
    unit, factor = next((unit for unit in reversed(_UNITS) if count >= unit[1]), _UNITS[0])
    return f"{count} B" if factor == 1 else f"{count / factor:,.3f} {unit}"


def _job(estimate: Estimate) -> list[str]:
    request, nodes = estimate.request, estimate.nodes
    shape = request.shape
    exact = request.mode is Mode.EXACT
    padded = f" (padded to {shape.padded_vocabulary:,})" if exact else ""
    stages = (
        _stages(shape)
        if exact
        else f"{_number(Fraction(shape.layers, shape.pipeline))} layer{'s' * (shape.layers != shape.pipeline)} a stage"
    )
    recomputation = "activations recomputed" if shape.recompute else "activations kept"
    mapping = request.mapping if request.mapping in ("default", "custom") else f"{request.mapping}'s"
    machines = f"{format_count(nodes.count, 'node')} of {format_count(nodes.gpus_per_node, 'GPU')}"
    return [
        f"{format_count(shape.layers, 'layer')}, hidden size {shape.hidden:,}, sequences of {shape.sequence:,} tokens, "
        f"vocabulary {shape.vocabulary:,}{padded}: {total_parameters(shape):,} parameters",
        f"{format_count(shape.ranks, 'rank')} on {machines}: pipeline {shape.pipeline} × tensor {shape.tensor} × "
        f"data {shape.data}, {mapping} mapping; {stages}",
        f"global batch {shape.global_batch:,} = {format_count(shape.micro_batches, 'micro-batch', 'es')} of "
        f"{shape.micro_batch} × {format_count(shape.data, 'replica')}; {recomputation}",
        *_split_words(shape, exact=exact),
        *(_terms(shape) if exact else ["estimated from the published equations, taken literally"]),
    ]


def _terms(shape: Shape) -> list[str]:
    """Which terms the bytes hold beyond the layers'."""
    terms = ["final layer norm"]
    if shape.tensor > 1:
        terms.append("AllReduce of the embedding")
    if shape.pipeline > 1:
        terms.append("sync of the word embedding")
    lines = []
    if shape.tensor > 1 and shape.output_layer:
        terms.append("AllReduces of output layer and loss")
    elif shape.tensor > 1:
        lines = ["not counted: AllReduces of output layer and loss on the last stage (--output-layer counts them)"]
    return [f"estimated from the real stages, with {', '.join(terms)}", *lines]


def _split_words(shape: Shape, *, exact: bool) -> list[str]:
    """What the split into stages means; nothing where there is one stage only."""
    if shape.pipeline == 1:
        return []
    if not exact:
        return ["stages: each pipeline rank holds the same part of the layers, also a fraction of one"]
    uneven = ", fewer to the last ones" if shape.layers % shape.pipeline else ""
    most = -(-shape.layers // shape.pipeline)
    return [f"stages: the layers in order, {most} to each pipeline rank{uneven}; what passes between them is pp"]


def _stages(shape: Shape) -> str:
    """`3 stages of 14 layers, 1 of 12`."""
    runs = [(len(list(run)), layers) for layers, run in groupby(shape.stage_layers(s) for s in range(shape.pipeline))]
    (first, layers), *rest = runs
    words = [f"{format_count(first, 'stage')} of {format_count(layers, 'layer')}"]
    return ", ".join(words + [f"{number} of {layers}" for number, layers in rest])


def _volumes(estimate: Estimate) -> list[str]:
    request, shape = estimate.request, estimate.request.shape
    held = f", {rank_parameters(shape, request.stage):,} parameters" if request.mode is Mode.EXACT else ""
    rows = [("", "messages", "each", "in all")]
    for row in fields(StageVolumes):
        if row.name == "loss" and not shape.output_layer:
            continue
        volume = getattr(estimate.volumes, row.name)
        sizes = (format_bytes(volume.message_bytes), format_bytes(volume.bytes)) if volume.messages else ("–", "–")
        rows.append((row.name, _number(volume.messages), *sizes))
    return [
        f"A rank of stage {request.stage} hands to NCCL in an iteration (payload{held})",
        *format_table(rows, "<>>>"),
    ]


def _pairs(estimate: Estimate) -> list[str]:
    flows, nodes = estimate.traffic, estimate.nodes
    pipeline, data, tensor = estimate.mapping.position_of(0)
    lines = [f"Rank 0 (pipeline {pipeline}, tensor {tensor}, data {data}) sends in an iteration (wire bytes)"]
    rows = [("to rank", "where", "bytes", "for")]
    for peer, count in flows.peers(0).items():
        node, rail = divmod(peer, nodes.gpus_per_node)
        where = f"node {node}, rail {rail}" if node else f"this node, GPU {rail}"
        rows.append((str(peer), where, format_bytes(count), ", ".join(_kinds_to(estimate, peer))))
    lines += format_table(rows, "><><") if len(rows) > 1 else ["  nothing: it is alone"]
    counted = ", ".join(f"{kind.name.lower()} {flows.select_kind(kind).pair_count:,}" for kind in Kind)
    possible = flows.possible_pairs
    share = f" ({_share(flows.pair_count, possible)})" if possible else ""
    lines.append(f"  directed pairs that talk: {flows.pair_count:,} of {possible:,}{share}: {counted}")
    return lines


def _kinds_to(estimate: Estimate, peer: int) -> list[str]:
    flows = estimate.traffic.flows
    own = flows[(flows["source"] == 0) & (flows["destination"] == peer)]
    return [Kind(kind).name.lower() for kind in own["kind"]]


def _between_nodes(estimate: Estimate) -> list[str]:
    flows, nodes = estimate.traffic, estimate.nodes
    total, leaving = flows.total_bytes, nodes.inter_node_bytes(flows)
    lines = ["Between nodes in an iteration (wire bytes)"]
    if not leaving:
        return [*lines, f"  nothing: all {format_bytes(total)} stay inside nodes" if total else "  nothing"]
    crossing = nodes.cross_rail_bytes(flows)
    by_node, by_nic = nodes.node_transmit_bytes(flows), nodes.nic_transmit_bytes(flows)
    busiest = int(np.argmax(by_nic))
    node, rail = divmod(busiest, nodes.gpus_per_node)
    rows = [
        ("leave the nodes", format_bytes(leaving), f"{_share(leaving, total)} of {format_bytes(total)}"),
        ("cross rails", format_bytes(crossing), f"{_share(crossing, leaving)} of that"),
        ("busiest NIC sends", format_bytes(int(by_nic[busiest])), f"node {node}, rail {rail}"),
    ]
    if nodes.count <= _MOST_NODES_SHOWN:
        rows += [(f"node {node} sends", format_bytes(int(count)), "") for node, count in enumerate(by_node)]
    else:
        most, least = int(np.argmax(by_node)), int(np.argmin(by_node))
        rows.append(("busiest node sends", format_bytes(int(by_node[most])), f"node {most}"))
        rows.append(("least busy node sends", format_bytes(int(by_node[least])), f"node {least}"))
    return [*lines, *format_table(rows, "<><")]


def _times(estimate: Estimate) -> list[str]:
    spent, rates, assumed = estimate.times, estimate.rates, estimate.assumed

    def rate(name: str) -> str:
        return f"at {_rate(getattr(rates, name), 'B/s')}{'*' if name in assumed else ''}"

    peak = f"{_rate(rates.peak_flop_per_second, 'FLOP/s')}{'*' if 'peak_flop_per_second' in assumed else ''}"
    reached = f"{rates.utilisation:g}{'*' if 'utilisation' in assumed else ''}"
    spans = (
        ("computation", spent.t_comp, f"at {peak} × {reached}"),
        ("tp", spent.t_tp, rate("tp_bytes_per_second")),
        ("pp", spent.t_pp, rate("pp_bytes_per_second")),
        ("dp", spent.t_dp, rate("dp_bytes_per_second")),
        ("pipeline bubble", spent.t_bubble, ""),
        ("iteration", spent.t_iter, ""),
    )
    unit, per_second = _time_unit(spent.t_iter)
    rows = [
        (name, f"{seconds * per_second:,.4f} {unit}", _share(seconds, spent.t_iter), why if seconds else "")
        for name, seconds, why in spans
    ]
    without = r_bubble_without_dp(estimate.request.shape)
    lines = [
        "Time of an iteration (the paper's equations: stages alike, nothing overlaps)",
        *format_table(rows, "<>><"),
        f"  communication ratio {spent.r_comm:.7f}; bubble ratio {spent.r_bubble:.6f}, without dp {without} = "
        f"{float(without):.6f}",
    ]
    if assumed:
        lines.append("  * assumed, as on H100 nodes with a 400 Gb/s NIC a GPU: give your own with --c-tp, --c-pp,")
        lines.append("    --c-dp (bytes/s), --peak-flops and --mu")
    return lines


def _share(part: float, whole: float) -> str:
    ratio = part / whole
    return f"{ratio:.2%}" if ratio >= 0.001 or not ratio else f"{100 * ratio:.2g}%"


def _number(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.2f}"


def _time_unit(seconds: float) -> tuple[str, float]:
    """The unit for a table whose largest time this is, and how many of it a second has."""
    return next((unit for unit in _TIME_UNITS if seconds * unit[1] >= 1), _TIME_UNITS[-1])


def _rate(value: float, unit: str) -> str:
    prefix, factor = next((prefix for prefix in reversed(_PREFIXES) if value >= prefix[1]), _PREFIXES[0])
    return f"{value / factor:g} {prefix}{unit}"
