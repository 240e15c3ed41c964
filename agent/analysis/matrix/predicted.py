"""The traffic matrix that the model expects of a job, before it runs (paper B draws it for two mappings of ranks).

Nothing is measured: bytes are those of `railscope estimate`, of one iteration, in the order in which its ranks fill
nodes.
"""

from __future__ import annotations

import csv
import io
import json

import numpy as np

from railscope.agent.analysis.facts.quantities import format_bytes, format_share
from railscope.agent.analysis.matrix.text import format_maps
from railscope.agent.analysis.pictures.heat import HeatMap, draw_heat_map, heat_map
from railscope.agent.analysis.pictures.parts import Picture
from railscope.agent.estimate.answer import Estimate
from railscope.agent.estimate.options import CUSTOM, DEFAULT
from railscope.agent.facts.counted import format_count


def predicted_heat(estimate: Estimate, most_cells: int = 256) -> HeatMap:
    """Wire bytes of an iteration by pair of ranks."""
    sources, destinations, moved = estimate.traffic.pairs()
    return heat_map(estimate.traffic.ranks, sources, destinations, moved, _servers(estimate), most_cells)


def draw_prediction(estimate: Estimate) -> Picture:
    """The heat map as a picture."""
    return draw_heat_map(predicted_heat(estimate), f"Predicted wire bytes of an iteration, {_mapping(estimate)}")


def format_prediction(estimate: Estimate, *, with_map: bool = True) -> str:
    """The heat map for a terminal, and what of it leaves nodes; at most 80 columns wide."""
    flows, nodes = estimate.traffic, estimate.nodes
    total, leaving = flows.total_bytes, nodes.inter_node_bytes(flows)
    shape = estimate.request.shape
    lines = [
        f"predicted: {format_count(flows.ranks, 'rank')}, pipeline {shape.pipeline} × tensor {shape.tensor} × data "
        f"{shape.data},",
        f"{_mapping(estimate)}; wire bytes of an iteration from rank (row) to rank (column)",
        "",
    ]
    if with_map:
        lines += [*format_maps([("predicted", predicted_heat(estimate, 36))]), ""]
    if flows.possible_pairs:
        share = format_share(flows.pair_count / flows.possible_pairs)
        lines.append(f"pairs that talk: {flows.pair_count:,} of {flows.possible_pairs:,} ({share})")
    if total:
        share = format_share(leaving / total)
        lines.append(f"wire bytes: {format_bytes(total)}, between nodes {format_bytes(leaving)} ({share})")
    return "\n".join(lines) + "\n"


def prediction_as_json(estimate: Estimate) -> str:
    """One object: `matrix`, the pairs of ranks with bytes, and sums of it."""
    flows = estimate.traffic
    columns = (column.tolist() for column in flows.pairs())
    content = {
        "ranks": flows.ranks,
        "matrix": [
            {"source": source, "destination": destination, "predicted_wire_bytes": moved}
            for source, destination, moved in zip(*columns, strict=True)
        ],
        "between_servers_wire_bytes": estimate.nodes.inter_node_bytes(flows),
    }
    return json.dumps(content, indent=2) + "\n"


def prediction_as_csv(estimate: Estimate) -> str:
    """A line for each pair of ranks with bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["source", "destination", "source_server", "destination_server", "predicted_wire_bytes"])
    servers = _servers(estimate)
    for source, destination, moved in zip(*(column.tolist() for column in estimate.traffic.pairs()), strict=True):
        writer.writerow([source, destination, servers[source], servers[destination], moved])
    return out.getvalue()


def _servers(estimate: Estimate) -> list[str]:
    nodes = np.arange(estimate.traffic.ranks) // estimate.nodes.gpus_per_node
    return [f"node {node}" for node in nodes.tolist()]


def _mapping(estimate: Estimate) -> str:
    name = estimate.request.mapping
    return f"{name if name in (DEFAULT, CUSTOM) else 'given'} mapping"
