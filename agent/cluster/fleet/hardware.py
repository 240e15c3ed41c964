"""What went wrong with the hardware of hosts, as a store knows it: what the kernel's log told of, and what is so now.

Each of these series is there only where something is wrong, so that they are asked for of all hosts at once: a host
that no rail or stall names may have the GPU that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import Agent, HardwareSign
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import Scrapes
from railscope.agent.facts import catalogue
from railscope.agent.facts.hardware_evidence import (
    BEFORE_SECONDS,
    HARMFUL_REASONS,
    RECOVERED_STATE,
    describe_event,
    describe_link_to_siblings,
    describe_module_alarm,
    describe_pcie_lanes,
    describe_recovery_of_gpu,
    describe_recovery_of_link,
    describe_slowed_gpu,
)

_MATTERS: Final = 'severity=~"page|warn"'
_RECOVERED: Final = f'state="{RECOVERED_STATE}"'
_ALARM: Final = 'alarm!~".*_warning"'
_WIDTH: Final = 'of="width"'
_REASONS: Final = f'reason=~"{"|".join(HARMFUL_REASONS)}"'


def read_hardware(ask: Asker, scrapes: Scrapes, window_seconds: float) -> tuple[HardwareSign, ...]:
    """What is wrong with hardware, and what the kernels' logs told of within the window and two minutes before it.

    Raises:
        PrometheusError: the store does not answer.
    """
    oldest = ask.at - window_seconds - BEFORE_SECONDS
    found = ask.query_all(
        events=f"{catalogue.HARDWARE_EVENT_TIMESTAMP.where(_MATTERS)} > {oldest:.3f}",
        recovering=f"{catalogue.RAIL_PHYSICAL_STATE.where(_RECOVERED)} == 1",
        links=f"{catalogue.RAIL_LINK_TO_SIBLINGS} < 1",
        alarms=f"{catalogue.RAIL_MODULE_ALARM.where(_ALARM)} == 1",
        pcie=f"{catalogue.PCIE_LINK_RATIO.where(_WIDTH)} < 1",
        actions=f"{catalogue.GPU_RECOVERY_ACTION} == 1",
        slowed=f"{catalogue.GPU_SLOWED.where(_REASONS)} == 1",
    )
    by_host = {agent.host: agent for agent in scrapes.agents}
    signs = [
        _sign(name, sample, scrapes, by_host)
        for name, samples in found.items()
        for sample in _without_repetition(name, samples)
        if sample.labels.get("instance") in scrapes.fresh
    ]
    # Of replicas of a store each says the same.
    return tuple(dict.fromkeys(signs))


def _without_repetition(name: str, samples: tuple[Sample, ...]) -> Iterator[Sample]:
    """Of a link with fewer lanes its speed, which is lower by as much, is no news."""
    lanes = {_link(one) for one in samples if one.labels.get("of") == "lanes"} if name == "links" else set()
    return (one for one in samples if one.labels.get("of") != "speed" or _link(one) not in lanes)


def _link(sample: Sample) -> tuple[str, str]:
    return sample.labels.get("instance", ""), sample.labels.get("device", "")


def _sign(name: str, sample: Sample, scrapes: Scrapes, agents: dict[str, Agent]) -> HardwareSign:
    def label(key: str) -> str:
        return sample.labels.get(key, "")

    instance, rail, device, gpu = (label(key) for key in ("instance", "rail", "device", "gpu"))
    host = scrapes.names.get(instance, instance)
    if name == "events":
        agent = agents.get(host)
        offset = (agent.clock_offset_seconds if agent is not None else None) or 0.0
        # Below a scrape interval it is not known: what is taken for it may be how late the scrape was.
        offset = offset if abs(offset) > (scrapes.interval_seconds or 0.0) else 0.0
        sentence = describe_event(label("kind"), label("code"), label("pci"))
        return HardwareSign(host, sentence, sample.value - offset)
    sentences = {
        "recovering": lambda: describe_recovery_of_link(rail, device),
        "links": lambda: describe_link_to_siblings(rail, device, label("of"), sample.value),
        "alarms": lambda: describe_module_alarm(rail, device, label("lane"), label("alarm")),
        "pcie": lambda: describe_pcie_lanes(device, label("pci"), sample.value),
        "actions": lambda: describe_recovery_of_gpu(gpu, label("action")),
        "slowed": lambda: describe_slowed_gpu(gpu, label("reason")),
    }
    return HardwareSign(host, sentences[name](), None, rail, device, gpu)
