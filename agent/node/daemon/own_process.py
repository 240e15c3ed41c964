"""The agent's own resource use: CPU time, memory, descriptors, start time.

These are the series that every Prometheus client exports of its process, under the same names
(https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics), so that dashboards for any exporter show
this one.  psutil reads them.
"""

from __future__ import annotations

import logging
import resource

import psutil

from railscope.agent.facts.snapshot import OwnProcessFacts

_log = logging.getLogger("railscope.daemon")


class OwnProcess:
    """The process that this runs in; safe from any thread."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._told = False

    def read(self) -> OwnProcessFacts | None:
        """The current resource use; None if the kernel does not tell, which is logged once."""
        try:
            with self._process.oneshot():
                times, memory = self._process.cpu_times(), self._process.memory_info()
                return OwnProcessFacts(
                    cpu_seconds=times.user + times.system,
                    resident_bytes=memory.rss,
                    virtual_bytes=memory.vms,
                    open_descriptors=self._process.num_fds(),
                    most_descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                    start_seconds=self._process.create_time(),
                )
        except (psutil.Error, OSError) as error:
            if not self._told:
                self._told = True
                _log.warning("the agent's own process cannot be read: %s", error)
            return None
