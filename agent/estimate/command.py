"""`railscope estimate`: what a job of a given shape should send, where, and how long it should take.

The answer comes from the model (agent/model) alone: nothing is measured, nothing of this host is read, and no rights
are needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.config.file import ConfigError
from railscope.agent.estimate.answer import Estimate, estimate_of
from railscope.agent.estimate.options import request_from
from railscope.agent.estimate.text import as_text
from railscope.agent.model.parameters import total_parameters
from railscope.agent.model.shape import ShapeError
from railscope.agent.model.times import r_bubble_without_dp
from railscope.agent.model.traffic import Kind
from railscope.agent.model.volumes import StageVolumes, Volume

FINE: Final = 0
COULD_NOT_RUN: Final = 2


def run_estimate(parsed: Any, out: TextIO, write_picture: Callable[[Estimate, Path], Path] | None = None) -> int:
    """Print the estimate; returns 0, or 2 where no job can be so, with one line on standard error.

    `write_picture` draws it into the file that `-o` names, and returns that; what it cannot do is a ConfigError.
    """
    try:
        estimate = estimate_of(request_from(parsed))
        written = None if write_picture is None else write_picture(estimate, parsed.output)
    except (ConfigError, ShapeError) as error:
        print(f"railscope estimate: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    if written is not None and not estimate.request.as_json:
        out.write(f"wrote {written}\n\n")
    out.write(as_json_text(estimate) if estimate.request.as_json else as_text(estimate))
    return FINE


def as_json_text(estimate: Estimate) -> str:
    """The estimate as one JSON object: bytes and counts as whole numbers, times in seconds, ratios of 1."""
    request, flows, nodes, spent = estimate.request, estimate.traffic, estimate.nodes, estimate.times
    shape, rates = request.shape, estimate.rates
    content = {
        "volumes": {row.name: _volume(getattr(estimate.volumes, row.name)) for row in fields(StageVolumes)},
        "pairs": {
            **{kind.name.lower(): flows.select_kind(kind).pair_count for kind in Kind},
            "total": flows.pair_count,
            "possible": flows.possible_pairs,
            "rank_0": {str(peer): count for peer, count in flows.peers(0).items()},
        },
        "inter_node_bytes": nodes.inter_node_bytes(flows),
        "node_transmit_bytes": nodes.node_transmit_bytes(flows).tolist(),
        "cross_rail_bytes": nodes.cross_rail_bytes(flows),
        "times": {name: getattr(spent, name) for name in ("t_tp", "t_pp", "t_dp", "t_comp", "t_bubble", "t_iter")},
        "r_comm": spent.r_comm,
        "r_bubble": spent.r_bubble,
        "r_bubble_without_dp": float(r_bubble_without_dp(shape)),
        "parameters": total_parameters(shape),
        "configuration": {
            **{field.name: getattr(shape, field.name) for field in fields(shape)},
            "micro_batches": shape.micro_batches,
            "padded_vocabulary": shape.padded_vocabulary,
            "mode": request.mode.value,
            "stage": request.stage,
            "mapping": request.mapping,
            "gpus_per_node": request.gpus_per_node,
            "rates": {field.name: getattr(rates, field.name) for field in fields(rates)},
            "assumed_rates": sorted(estimate.assumed),
        },
    }
    return json.dumps(content, indent=2) + "\n"


def _volume(volume: Volume) -> dict[str, int | float]:
    messages = volume.messages
    return {
        "messages": int(messages) if messages.denominator == 1 else float(messages),
        "message_bytes": volume.message_bytes,
        "bytes": volume.bytes,
    }
