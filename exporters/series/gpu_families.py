"""The metric families of GPUs and NVLinks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from railscope.agent.facts import catalogue
from railscope.agent.facts.snapshot import NodeGpus, NvlinkFacts
from railscope.exporters.series.family import Sample
from railscope.exporters.series.family_draft import RECEIVE, TRANSMIT, Draft, make_draft
from railscope.exporters.series.selection import Selection


def gpu_families(known_gpus: NodeGpus, selection: Selection) -> Iterator[Draft]:
    """The metric families of GPUs and their NVLinks."""
    gpus, links = known_gpus.devices, known_gpus.nvlinks
    yield Draft(catalogue.GPU_INFO, (((one.gpu, one.uuid, one.pci, one.name, one.numa, one.fabric), 1) for one in gpus))
    yield Draft(
        catalogue.GPU_FABRIC_UNHEALTHY, (((one.gpu, reason), 1) for one in gpus for reason in one.fabric_unhealthy)
    )
    yield make_draft(catalogue.GPU_PCIE_TRANSMIT_BYTES, (((one.gpu,), one.pcie_transmit_bytes) for one in gpus))
    yield make_draft(catalogue.GPU_PCIE_RECEIVE_BYTES, (((one.gpu,), one.pcie_receive_bytes) for one in gpus))
    yield from _links(links, selection)
    yield from _of_all_links(links, selection)
    yield make_draft(catalogue.NVLINK_REFRESH_SECONDS, (((one.gpu,), one.refresh_seconds) for one in gpus))


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


def _of_all_links(links: tuple[NvlinkFacts, ...], selection: Selection) -> Iterator[Draft]:
    """The series of all links of a GPU together."""
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
    yield Draft(
        catalogue.GPU_NVLINK_ERRORS,
        ((whose, selection.total_increase(whose, found)) for whose, found in errors.items()),
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
