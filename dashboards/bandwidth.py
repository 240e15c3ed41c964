"""Bus bandwidth of jobs beside what the rails of their hosts could carry, as PromQL.

In a ring over hosts every byte of a collective passes each host's edge once in each direction, so busbw, as nccl-tests
define it, cannot exceed what all rails of a host send together.  Operations of a mebibyte and more are meant: smaller
ones wait for latency, whatever the rails could carry.
"""

from __future__ import annotations

from typing import Final

from railscope.agent.facts import catalogue
from railscope.dashboards import recorded
from railscope.dashboards.variables import HOST, JOB

LARGE: Final = 'size=~"[0-9]{7,}"'
"""Sizes are powers of two in bytes: those with seven digits begin at a mebibyte."""
_HOSTS: Final = f"group by (cluster, job, instance, exported_job) ({recorded.PROCESSES_OF_JOB.where(JOB)})"


def bus_bandwidth() -> str:
    """By job, bytes per second; where jobs share a host, its operations count for each."""
    bus, seconds = catalogue.COLLECTIVE_COMPLETED_BUS_BYTES.name, catalogue.COLLECTIVE_COMPLETED_SECONDS.name
    return f"{_of_jobs(bus)} / ({_of_jobs(seconds)} > 0)"


def line_rate() -> str:
    """By job, bytes per second: of all rails together, of its host where that is least."""
    speeds = f"max by (cluster, job, instance, netns, rail) ({catalogue.RAIL_SPEED.where(HOST)})"
    of_hosts = f"sum by (cluster, job, instance) ({speeds})"
    return f"min by (cluster, exported_job) ({_HOSTS} * on (cluster, job, instance) group_left () {of_hosts})"


def against_line_rate() -> str:
    """By job, as a ratio."""
    return f"{bus_bandwidth()} / {line_rate()}"


def _of_jobs(counter: str) -> str:
    of_hosts = f"sum by (cluster, job, instance) (rate({counter}{{{LARGE},{HOST}}}[$__rate_interval]))"
    return f"sum by (cluster, exported_job) ({_HOSTS} * on (cluster, job, instance) group_left () {of_hosts})"
