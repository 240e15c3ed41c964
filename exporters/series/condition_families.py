"""The metric families of the condition of a node's hardware: PCIe links, modules, the kernel's log."""

from __future__ import annotations

from collections.abc import Iterator

from railscope.agent.facts import catalogue
from railscope.agent.facts.hardware import NodeCondition, PcieFacts
from railscope.exporters.series.family import Sample
from railscope.exporters.series.family_draft import RECEIVE, TRANSMIT, Draft, make_draft


def condition_families(condition: NodeCondition) -> Iterator[Draft]:
    """What is known of the hardware's condition; what is sound has few series here."""
    yield Draft(catalogue.PCIE_LINK_RATIO, (sample for one in condition.pcie for sample in _ratios(one)))
    yield Draft(
        catalogue.PCIE_ERRORS,
        (
            ((one.device, pci, severity, name), count)
            for one in condition.pcie
            for pci, severity, name, count in one.errors
            if count
        ),
    )
    modules = condition.modules
    yield make_draft(
        catalogue.RAIL_MODULE_TEMPERATURE, (((one.rail, one.device), one.temperature_celsius) for one in modules)
    )
    yield make_draft(
        catalogue.RAIL_MODULE_POWER,
        (
            ((one.rail, one.device, direction), watts)
            for one in modules
            for direction, watts in ((TRANSMIT, one.transmit_watts), (RECEIVE, one.receive_watts))
        ),
    )
    yield Draft(
        catalogue.RAIL_MODULE_ALARM,
        (((one.rail, one.device, lane, alarm), 1) for one in modules for lane, alarm in one.alarms),
    )
    yield make_draft(
        catalogue.RAIL_FEC_BLOCKS,
        (
            ((one.rail, one.device, result), blocks)
            for one in modules
            for result, blocks in (("corrected", one.corrected_blocks), ("uncorrectable", one.uncorrectable_blocks))
        ),
    )
    yield Draft(
        catalogue.RAIL_FEC_CORRECTED,
        (
            ((one.rail, one.device, str(fewest), str(most)), blocks)
            for one in modules
            for fewest, most, blocks in one.fec_histogram
            if blocks
        ),
    )
    events = [((one.kind, one.code, one.pci, one.severity), one) for one in condition.events]
    yield Draft(catalogue.HARDWARE_EVENTS, ((labels, one.count) for labels, one in events))
    yield Draft(catalogue.HARDWARE_EVENT_TIMESTAMP, ((labels, one.last_seconds) for labels, one in events))


def _ratios(one: PcieFacts) -> Iterator[Sample]:
    for of, now, possible in (
        ("width", one.lanes, one.lanes_possible),
        ("speed", one.speed_gigatransfers, one.speed_possible_gigatransfers),
    ):
        if now is not None and possible and now < possible:
            yield (one.device, one.pci, of), now / possible
