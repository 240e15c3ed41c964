"""The metric families of GPUs and NVLinks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.hardware import ALL_LINKS, GpuFacts, NodeGpus, NvlinkFacts
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.exporters.series.family import Sample
from railscope.exporters.series.family_draft import RECEIVE, TRANSMIT, Draft, make_draft
from railscope.exporters.series.selection import Selection

_MUCH_CORRECTED: Final = 8
"""Symbols in a block: half of what error correction can mend."""


def gpu_families(known_gpus: NodeGpus, selection: Selection) -> Iterator[Draft]:
    """The metric families of GPUs and their NVLinks."""
    gpus, links = known_gpus.devices, known_gpus.nvlinks
    yield Draft(catalogue.GPU_INFO, ((_identity(one), 1) for one in gpus))
    yield Draft(
        catalogue.GPU_FABRIC_UNHEALTHY, (((one.gpu, reason), 1) for one in gpus for reason in one.fabric_unhealthy)
    )
    yield Draft(
        catalogue.GPU_FABRIC_INFO,
        (
            ((one.gpu, one.fabric_cluster or UNKNOWN, one.fabric_clique or UNKNOWN, one.fabric), 1)
            for one in gpus
            if one.fabric not in (UNKNOWN, "not_supported")
        ),
    )
    yield make_draft(catalogue.GPU_FABRIC_ERROR, (((one.gpu,), one.fabric_error or None) for one in gpus))
    yield make_draft(catalogue.GPU_FABRIC_HEALTH_MASK, (((one.gpu,), one.fabric_health_mask or None) for one in gpus))
    yield from _conditions(gpus)
    yield make_draft(catalogue.GPU_PCIE_TRANSMIT_BYTES, (((one.gpu,), one.pcie_transmit_bytes) for one in gpus))
    yield make_draft(catalogue.GPU_PCIE_RECEIVE_BYTES, (((one.gpu,), one.pcie_receive_bytes) for one in gpus))
    yield from _links(tuple(one for one in links if one.link != ALL_LINKS), selection)
    yield from _of_all_links(links, selection)
    yield make_draft(catalogue.NVLINK_REFRESH_SECONDS, (((one.gpu,), one.refresh_seconds) for one in gpus))


def _conditions(gpus: tuple[GpuFacts, ...]) -> Iterator[Draft]:
    """What is wrong with GPUs: a sound one has no series here."""
    yield Draft(
        catalogue.GPU_ECC_ERRORS,
        (((one.gpu, kind, since), count) for one in gpus for kind, since, count in one.ecc_errors if count),
    )
    yield Draft(
        catalogue.GPU_REMAPPED_ROWS,
        (((one.gpu, kind), rows) for one in gpus for kind, rows in one.remapped_rows if rows),
    )
    yield Draft(catalogue.GPU_ROW_REMAP_PENDING, (((one.gpu,), 1) for one in gpus if one.remap_pending))
    yield Draft(catalogue.GPU_ROW_REMAP_FAILED, (((one.gpu,), 1) for one in gpus if one.remap_failed))
    yield Draft(
        catalogue.GPU_PCIE_ERRORS,
        (((one.gpu, kind), count) for one in gpus for kind, count in one.pcie_errors if count),
    )
    yield Draft(catalogue.GPU_SLOWED, (((one.gpu, reason), 1) for one in gpus for reason in one.slowed_by or ()))
    yield Draft(
        catalogue.GPU_RECOVERY_ACTION,
        (((one.gpu, one.recovery_action), 1) for one in gpus if one.recovery_action not in (None, "none")),
    )


def _identity(one: GpuFacts) -> tuple[str, ...]:
    return one.gpu, one.uuid, one.pci, one.name, one.numa, one.fabric, one.uuid, one.pci_bus_id


def _links(links: tuple[NvlinkFacts, ...], selection: Selection) -> Iterator[Draft]:
    yield Draft(
        catalogue.NVLINK_INFO, (((one.gpu, one.link, one.remote, one.remote_type, one.counted), 1) for one in links)
    )
    yield make_draft(
        catalogue.NVLINK_UP, (((one.gpu, one.link), None if one.up is None else int(one.up)) for one in links)
    )
    detailed = links if selection.nvlinks else ()
    yield make_draft(catalogue.NVLINK_SPEED, (((one.gpu, one.link), one.speed_bytes_per_second) for one in detailed))
    yield make_draft(catalogue.NVLINK_TRANSMIT_BYTES, (((one.gpu, one.link), one.transmit_bytes) for one in links))
    yield make_draft(catalogue.NVLINK_RECEIVE_BYTES, (((one.gpu, one.link), one.receive_bytes) for one in links))
    yield make_draft(
        catalogue.NVLINK_UTILIZATION,
        (
            ((one.gpu, one.link, direction), value)
            for one in detailed
            for direction, value in ((TRANSMIT, one.transmit_utilization), (RECEIVE, one.receive_utilization))
        ),
    )
    yield Draft(
        catalogue.NVLINK_ERRORS,
        (
            ((one.gpu, one.link, kind), count)
            for one in links
            for kind, count in one.errors
            if count or selection.nvlinks
        ),
    )

    yield Draft(
        catalogue.NVLINK_BIT_ERROR_RATIO,
        (
            ((one.gpu, one.link, kind), ratio)
            for one in links
            for kind, ratio in one.bit_error_ratios
            if ratio or selection.nvlinks
        ),
    )
    yield Draft(
        catalogue.NVLINK_FEC_BLOCKS,
        (
            ((one.gpu, one.link, corrected), count)
            for one in links
            for corrected, count in one.fec_blocks
            if selection.nvlinks or (count and int(corrected) >= _MUCH_CORRECTED)
        ),
    )


def _of_all_links(links: tuple[NvlinkFacts, ...], selection: Selection) -> Iterator[Draft]:
    """The series of all links of a GPU together, some of which count in no other way."""
    together = [one for one in links if one.link == ALL_LINKS]
    yield make_draft(catalogue.GPU_NVLINK_TRANSMIT_BYTES, (((one.gpu,), one.transmit_bytes) for one in together))
    yield make_draft(catalogue.GPU_NVLINK_RECEIVE_BYTES, (((one.gpu,), one.receive_bytes) for one in together))
    by_gpu: defaultdict[str, list[NvlinkFacts]] = defaultdict(list)
    for link in links:
        by_gpu[link.gpu].append(link)
    up: defaultdict[str, int] = defaultdict(int)
    for link in links:
        if link.up is not None:
            up[link.gpu] += link.up
    yield Draft(catalogue.GPU_NVLINKS_UP, (((gpu,), count) for gpu, count in up.items()))
    speeds: defaultdict[str, int] = defaultdict(int)
    for link in links:
        if link.speed_bytes_per_second is not None:
            speeds[link.gpu] += link.speed_bytes_per_second
    yield Draft(catalogue.GPU_NVLINK_SPEED, (((gpu,), speed) for gpu, speed in speeds.items()))
    yield Draft(
        catalogue.GPU_NVLINK_UTILIZATION,
        (sample for gpu, found in by_gpu.items() for sample in _utilization(gpu, found)),
    )
    errors: defaultdict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for link in links:
        for kind, count in link.errors:
            errors[link.gpu, kind].append((link.link, count))
    # Where a GPU counts errors of a kind for all links together, those of single links are part of that.
    summed = {whose: [one for one in of if one[0] == ALL_LINKS] or of for whose, of in errors.items()}
    yield Draft(
        catalogue.GPU_NVLINK_ERRORS,
        ((whose, selection.total_increase(whose, found)) for whose, found in summed.items()),
    )


def _utilization(gpu: str, links: list[NvlinkFacts]) -> Iterator[Sample]:
    for direction, values in (
        (TRANSMIT, [link.transmit_utilization for link in links]),
        (RECEIVE, [link.receive_utilization for link in links]),
    ):
        seen = [value for value in values if value is not None]
        if seen:
            yield (gpu, direction, "mean"), fmean(seen)
            yield (gpu, direction, "max"), max(seen)
