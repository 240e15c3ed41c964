"""The model's answer to one question of `railscope estimate`, with what had to be assumed.

Payload is what a rank hands to NCCL; bytes of pairs and nodes are wire bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from railscope.agent.config.file import ConfigError
from railscope.agent.estimate.options import CUSTOM, DEFAULT, GivenRates, Request, read_text
from railscope.agent.model.mapping import Mapping, custom_mapping, default_mapping, parse_mapping
from railscope.agent.model.shape import Shape, ShapeError
from railscope.agent.model.times import Rates, Times, estimate_times
from railscope.agent.model.traffic import Kind, Nodes, Traffic, estimate_traffic
from railscope.agent.model.volumes import StageVolumes, stage_volumes

_LARGEST_MAPPING_BYTES: Final = 1 << 26
_NVLINK_BYTES_PER_SECOND: Final = 360e9
"""Assumed inside a node: about what nccl-tests show as bus bandwidth of rings over NVLink 4 (450 GB/s)."""
_NIC_BYTES_PER_SECOND: Final = 45e9
"""Assumed between nodes: nine tenths of a 400 Gb/s NIC for each GPU."""
_PEAK_FLOP_PER_SECOND: Final = 989e12
"""Assumed: dense BF16 of an H100 SXM, from its data sheet."""
_UTILISATION: Final = 0.4
"""Assumed: what well-tuned training reaches."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer to one question."""

    request: Request
    volumes: StageVolumes
    """Payload of one rank of the stage that was asked for."""
    mapping: Mapping
    traffic: Traffic
    """Wire bytes between all ranks."""
    nodes: Nodes
    rates: Rates
    assumed: frozenset[str]
    """Fields of `rates` that were not given."""
    times: Times


def estimate_of(request: Request) -> Estimate:
    """Ask the analytical model for a job's estimate.

    Raises:
        ConfigError: the mapping's file cannot be used.
        ShapeError: no job can be so.
    """
    shape = request.shape
    volumes = stage_volumes(shape, request.mode, request.stage)
    nodes = Nodes(shape.ranks, request.gpus_per_node)
    mapping = mapping_of(request.mapping, shape)
    flows = estimate_traffic(shape, mapping, request.mode)
    rates, assumed = complete_rates(request.rates, flows, nodes)
    return Estimate(request, volumes, mapping, flows, nodes, rates, assumed, estimate_times(shape, rates))


def mapping_of(name: str, shape: Shape) -> Mapping:
    """The mapping of ranks to GPUs of this name, or in the file of this name.

    Raises:
        ConfigError: the file cannot be read, or holds no mapping of this job.
    """
    if name == DEFAULT:
        return default_mapping(shape)
    if name == CUSTOM:
        return custom_mapping(shape)
    text = read_text(Path(name), "mapping file", _LARGEST_MAPPING_BYTES)
    try:
        return parse_mapping(text, shape)
    except ShapeError as error:
        raise ConfigError(f"{name}: {error}") from None


def complete_rates(given: GivenRates, flows: Traffic, nodes: Nodes) -> tuple[Rates, frozenset[str]]:
    """The given rates, completed with assumed ones of H100 nodes (400 Gb/s NIC a GPU); and which were assumed.

    A parallelism that leaves nodes anywhere goes at the speed of a NIC, any other at that of NVLink.
    """
    assumptions = {
        "tp_bytes_per_second": _link_rate(flows.select_kind(Kind.TP), nodes),
        "pp_bytes_per_second": _link_rate(flows.select_kind(Kind.PP), nodes),
        "dp_bytes_per_second": _link_rate(flows.select_kind(Kind.DP), nodes),
        "peak_flop_per_second": _PEAK_FLOP_PER_SECOND,
        "utilisation": _UTILISATION,
    }
    said = {field.name: getattr(given, field.name) for field in fields(given)}
    assumed = frozenset(name for name, value in said.items() if value is None)
    return Rates(**{name: assumptions[name] if name in assumed else said[name] for name in assumptions}), assumed


def _link_rate(flows: Traffic, nodes: Nodes) -> float:
    return _NIC_BYTES_PER_SECOND if nodes.inter_node_bytes(flows) else _NVLINK_BYTES_PER_SECOND
