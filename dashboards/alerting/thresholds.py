"""Numbers that decide when an alert fires: what `railscope dashboards build --threshold NAME=VALUE` sets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any


def _threshold(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Thresholds:
    """One number for each; the unit stands in the name."""

    rail_used_bytes_per_second: float = _threshold(1e6, "a rail that never sent more is none that jobs use")
    plane_hosts: float = _threshold(8, "on which a rail is down at once before it counts as its switch")
    rail_warnings_per_second: float = _threshold(0.1, "by which a counter with severity warn may rise for long")
    queue_bytes: float = _threshold(65536, "a rail's queue; a shorter one counts as empty")
    queue_to_siblings_ratio: float = _threshold(8, "a rail's queue, against the shortest of its siblings")
    round_trip_seconds: float = _threshold(0.003, "round trips on a rail; shorter ones do not matter")
    round_trip_to_siblings_ratio: float = _threshold(5, "round trips on a rail, against the best of its siblings")
    rail_full_ratio: float = _threshold(0.8, "of its line rate; a rail that sends more is full, not slow")
    pace_to_siblings_ratio: float = _threshold(0.75, "of what the best sibling carries while it sends; less is slow")
    retransmitted_ratio: float = _threshold(0.01, "of TCP payload that is sent again")
    waited_for_ratio: float = _threshold(0.25, "of their time for which other ranks may wait for one")
    nvlink_errors_per_second: float = _threshold(0.1, "that a GPU's NVLinks may count for long")
    nvlink_recoveries: float = _threshold(3, "of a GPU's NVLinks in two hours, and before them, that mean a failure")
    rail_flaps_per_hour: float = _threshold(6, "changes of a rail's link, two for each time that it was lost")
    pauses_per_second: float = _threshold(10, "of a rail that sends nothing; fewer are no storm")
    pcie_errors_per_second: float = _threshold(0.1, "of a PCIe link for long")
    bus_bandwidth_ratio: float = _threshold(0.7, "of the bus bandwidth that was held before; less has fallen")
    step_time_ratio: float = _threshold(1.25, "of the step time that was held before; more has become longer")
    loop_late_seconds: float = _threshold(5, "by which the agent's loop may be late")
    removed_host_seconds: float = _threshold(3 * 86400, "for which a host with a job that Prometheus forgot is missed")
    dark_seconds: float = _threshold(120, "of an hour in which no agent may run")


def parse_thresholds(settings: Iterable[str]) -> Thresholds:
    """The defaults with these changed, each as `NAME=VALUE`.

    Raises:
        ValueError: there is no such threshold, or it is given no positive number.
    """
    known = [one.name for one in fields(Thresholds)]
    changed = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            raise ValueError(f"--threshold {setting}: there is no {name!r}; there are {', '.join(known)}")
        try:
            value = float(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise ValueError(f"--threshold {setting}: write a number above 0, as in {name}=1")
        changed[name] = value
    return replace(Thresholds(), **changed)


def describe_thresholds() -> str:
    """A line for each, with its default, for a help text."""
    return "\n".join(f"  {one.name}={one.default:g}: {one.metadata['meaning']}" for one in fields(Thresholds))
