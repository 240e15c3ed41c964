"""The monitoring stack as operators set it up, around namespace hosts: agents, Prometheus, Alertmanager, a webhook.

The configuration is what is shipped: deploy/prometheus, deploy/alertmanager and dashboards/rules are copied, as their
READMEs say, into one folder, and only the list of targets is written for the hosts that there are.  Servers run in the
fabric's switch namespace at the ports that those files name, and are led out to free ports of 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from railscope.dashboards import rules_files
from railscope.testbed.hosts import MANAGEMENT_SWITCH_ADDRESS, Fabric
from tests.faults.cluster import (
    AGENT_PORT,
    PROMETHEUS_PORT,
    Cluster,
    Server,
    in_namespace,
    program,
)
from tests.stack.loopback import loopback
from tests.stack.webhook import Notified, Webhook

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
ALERTMANAGER_PORT: Final = 9093
WEBHOOK_PORT: Final = 9780
"""As deploy/prometheus/prometheus.yml and deploy/alertmanager/alertmanager.yml name them."""
_INTERVALS: Final = re.compile(r"\b(scrape_interval|evaluation_interval|group_wait|group_interval): \w+")
_HOLDS: Final = re.compile(r"\bfor: \w+")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast news travels; None: as shipped."""

    interval: str | None = None
    """Of scrapes, evaluations and notifications, as in `5s`."""
    holds: str | None = None
    """How long a condition must hold before its alert fires."""

    def applied(self, text: str) -> str:
        """A configuration at this pace."""
        if self.interval is not None:
            text = _INTERVALS.sub(rf"\1: {self.interval}", text)
        if self.holds is not None:
            text = _HOLDS.sub(f"for: {self.holds}", text)
        return text


AS_SHIPPED: Final = Pace()


def lay_out(folder: Path, pace: Pace = AS_SHIPPED) -> None:
    """Put the shipped configuration of Prometheus and Alertmanager into one folder, as on a server of theirs."""
    shipped = [*(DEPLOY / "prometheus").glob("*.yml"), *(DEPLOY / "alertmanager").glob("*.yml")]
    for file in [*shipped, *rules_files.SHIPPED.glob("*.yml")]:
        (folder / file.name).write_text(pace.applied(file.read_text()))


class Stack:
    """Everything but a job, for as long as the `with` block lasts."""

    def __init__(
        self,
        hosts: int = 2,
        *,
        pace: Pace = AS_SHIPPED,
        agent: Sequence[str] = (),
        prometheus: Sequence[str] = (),
        told: Callable[[Notified], None] = lambda _: None,
    ) -> None:
        """`agent`, `prometheus`: further arguments of theirs.  `told` is called of every alert that is notified."""
        self._cluster = Cluster(hosts, agent=agent)
        self._prometheus_arguments = prometheus
        self._pace = pace
        self._told = told
        self._left = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begin; everything answers when this returns.

        Raises:
            ClusterError: a server is not installed, or does not come up.
            TestbedError: not root, or no namespaces can be made.
        """
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(self._cluster)
            switch = cluster.fabric.switch
            configuration = cluster.folder / "etc"
            configuration.mkdir()
            lay_out(configuration, self._pace)
            self._write_targets(configuration / "gpu-nodes.yml")
            self.webhook = stack.enter_context(Webhook(switch, WEBHOOK_PORT, self._told))
            self.prometheus_url = stack.enter_context(loopback(switch, MANAGEMENT_SWITCH_ADDRESS, PROMETHEUS_PORT))
            self.alertmanager_url = stack.enter_context(loopback(switch, "127.0.0.1", ALERTMANAGER_PORT))
            self._start_alertmanager(stack, configuration / "alertmanager.yml")
            stack.callback(cluster.prometheus.stop)
            external = f"--web.external-url={self.prometheus_url}"
            cluster.prometheus.run(configuration / "prometheus.yml", external, *self._prometheus_arguments)
            self._left = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.close()

    @property
    def folder(self) -> Path:
        """Where the servers keep what they have."""
        return self._cluster.folder

    @property
    def fabric(self) -> Fabric:
        """The hosts and rails."""
        return self._cluster.fabric

    def check(self) -> None:
        """Nothing, while everything runs and all agents answer.

        Raises:
            ClusterError: an agent or a server has ended.
            WebError: an agent does not answer.
        """
        self._alertmanager.check()
        self._cluster.prometheus.check()
        for agent in self._cluster.agents:
            agent.text()

    def _write_targets(self, file: Path) -> None:
        groups = [
            {"targets": [f"{host.management_address}:{AGENT_PORT}"], "labels": {"instance": f"host{host.index}"}}
            for host in self.fabric.hosts
        ]
        file.write_text(json.dumps(groups))  # every JSON document is YAML

    def _start_alertmanager(self, stack: contextlib.ExitStack, configuration: Path) -> None:
        command = [program("prometheus-alertmanager", "prometheus-alertmanager"), f"--config.file={configuration}"]
        command += [f"--storage.path={self._cluster.folder / 'alertmanager'}", "--log.level=warn"]
        command += [f"--web.listen-address=127.0.0.1:{ALERTMANAGER_PORT}", "--cluster.listen-address="]
        command += [f"--web.external-url={self.alertmanager_url}"]
        self._alertmanager = Server(
            in_namespace(self.fabric.switch, command), self._cluster.folder / "alertmanager.log"
        )
        stack.callback(self._alertmanager.end)
        self._alertmanager.ready(self.fabric.switch, "127.0.0.1", ALERTMANAGER_PORT, "/-/ready")
