"""A small cluster to break: hosts with two rails each, the agent on every host, and Prometheus beside them.

Each host runs `railscope agent --scope netns` inside its namespace, listening on the host's management address, port
9779 as on real nodes.  Prometheus runs in the switch namespace, on the management network's own address, and scrapes
the hosts there: no fault of a rail touches the scrapes, and nothing of this reaches the machine's own network.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from railscope.testbed.hosts import MANAGEMENT_SWITCH_ADDRESS, Fabric, Host
from tests.faults.web import Sample, WebError, get, instant_query, samples_of
from tests.waiting import pause

RAILSCOPE: Final = Path(sys.executable).with_name("railscope")
AGENT_PORT: Final = 9779
PROMETHEUS_PORT: Final = 9090
READY_SECONDS: Final = 60.0
LEAVE_SECONDS: Final = 10.0


class ClusterError(RuntimeError):
    """A part of the cluster does not work; the message holds what it said."""


def until(condition: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
    """Wait until something holds.

    Raises:
        ClusterError: it does not hold within `seconds`.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + seconds:
            raise ClusterError(f"{what}: not within {seconds:g} s")
        pause(began)


def program(name: str, package: str) -> str:
    """The path of a program of Debian's.

    Raises:
        ClusterError: it is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise ClusterError(f"{name} is missing: install Debian's package {package}, or run `make packages-test`")
    return found


def in_namespace(namespace: str, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` there."""
    return ["ip", "netns", "exec", namespace, *command]


class Server:
    """A program inside a namespace; what it says is kept for whoever asks why."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Nothing, while it runs.

        Raises:
            ClusterError: it has ended.
        """
        if self._process.poll() is not None:
            said = self._log.read_text(errors="replace").strip().splitlines()
            last = said[-1] if said else "it said nothing"
            what = f"{self._log.stem} ended with status {self._process.returncode}: {last}"
            raise ClusterError("\n".join([what, *said[-20:]]))

    def ready(self, namespace: str, host: str, port: int, path: str) -> None:
        """Wait until it answers there, as seen from a namespace.

        Raises:
            ClusterError: it ended, or takes too long.
        """

        def answers() -> bool:
            self.check()
            with contextlib.suppress(WebError):
                get(namespace, host, port, path)
                return True
            return False

        until(answers, f"{self._log.stem} is ready")

    def end(self) -> None:
        """Ask it to end, and end it if that takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Agent:
    """The agent on one host, from `start` to `stop`."""

    def __init__(self, host: Host, switch: str, arguments: Sequence[str], folder: Path) -> None:
        assert host.management_address is not None
        self.host: Final = host
        self.address: Final = host.management_address
        self._switch = switch
        self._arguments = tuple(arguments)
        self._log = folder / f"agent-host{host.index}.log"
        self._process: Server | None = None

    def start(self) -> None:
        """Begin; `ready` waits."""
        command = [str(RAILSCOPE), "agent", "--scope", "netns", "--recordings.directory", ""]
        # By NCCL's own choice the management network would be one more.
        command += ["--rail.devices", ",".join(self.host.rails)]
        command += ["--web.listen-address", f"{self.address}:{AGENT_PORT}", *self._arguments]
        self._process = Server(self.host.command(*command), self._log)

    def ready(self) -> None:
        """Wait until it answers.

        Raises:
            ClusterError: it ended, or takes too long.
        """

        assert self._process is not None
        self._process.ready(self._switch, self.address, AGENT_PORT, "/readyz")

    def stop(self) -> None:
        """End it; harmless when it does not run."""
        if self._process is not None:
            self._process.end()
            self._process = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def text(self) -> str:
        """The whole exposition.

        Raises:
            WebError: it does not answer, as while it is restarted.
            ClusterError: it has ended by itself.
        """
        try:
            return get(self._switch, self.address, AGENT_PORT, "/metrics").decode()
        except WebError:
            if self._process is not None:
                self._process.check()
            raise

    def mend(self) -> None:
        """Start it again if it has ended by itself."""
        try:
            if self._process is not None:
                self._process.check()
        except ClusterError:
            self.start()
            self.ready()

    def samples(self, *names: str) -> list[Sample]:
        """Samples with these names (`railscope_` is prefixed)."""
        return samples_of(self.text(), [f"railscope_{name}" for name in names])

    def stalls(self) -> Any:
        """What /stalls says."""
        return json.loads(get(self._switch, self.address, AGENT_PORT, "/stalls"))

    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text(errors="replace")


class Prometheus:
    """Debian's Prometheus in the switch namespace, scraping every agent each second."""

    def __init__(self, fabric: Fabric, folder: Path) -> None:
        self._fabric = fabric
        self._folder = folder
        self._process: Server | None = None
        self.url: Final = f"http://{MANAGEMENT_SWITCH_ADDRESS}:{PROMETHEUS_PORT}"

    def start(self, hosts: Iterable[Host], rules: Sequence[Path] = ()) -> None:
        """Scrape these hosts; waits until it answers.

        Raises:
            ClusterError: it is not installed, or does not come up.
        """
        targets = [
            {"targets": [f"{host.management_address}:{AGENT_PORT}"], "labels": {"host": f"host{host.index}"}}
            for host in hosts
        ]
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [{"job_name": "railscope", "static_configs": targets}],
        }
        path = self._folder / "prometheus.yml"
        path.write_text(json.dumps(configuration))  # every JSON document is YAML
        self.run(path)

    def run(self, configuration: Path, *arguments: str) -> None:
        """Run with a configuration that is written already; waits until it answers.

        Raises:
            ClusterError: it is not installed, or does not come up.
        """
        command = [program("prometheus", "prometheus"), f"--config.file={configuration}", "--log.level=warn"]
        command += [f"--storage.tsdb.path={self._folder / 'prometheus'}", *arguments]
        command += [f"--web.listen-address={MANAGEMENT_SWITCH_ADDRESS}:{PROMETHEUS_PORT}"]
        self._process = Server(in_namespace(self._fabric.switch, command), self._folder / "prometheus.log")
        self._process.ready(self._fabric.switch, MANAGEMENT_SWITCH_ADDRESS, PROMETHEUS_PORT, "/-/ready")

    def stop(self) -> None:
        """End it; harmless when it does not run."""
        if self._process is not None:
            self._process.end()
            self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def check(self) -> None:
        """Nothing, while it runs.

        Raises:
            ClusterError: it has ended by itself.
        """
        if self._process is not None:
            self._process.check()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        return instant_query(self._fabric.switch, MANAGEMENT_SWITCH_ADDRESS, PROMETHEUS_PORT, expression)


class Cluster:
    """A fabric with an agent on each host for as long as the `with` block lasts."""

    def __init__(self, hosts: int = 2, *, agent: Sequence[str] = (), prometheus: bool = False) -> None:
        """`agent`: further arguments of every agent.  With `prometheus` it scrapes all hosts from the beginning."""
        self.fabric: Final = Fabric(hosts=hosts, rails=2, management=True)
        self._agent_arguments = tuple(agent)
        self._with_prometheus = prometheus
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railscope-faults-")))
            stack.enter_context(self.fabric)
            self.agents = tuple(
                Agent(host, self.fabric.switch, self._agent_arguments, self.folder) for host in self.fabric.hosts
            )
            self.prometheus = Prometheus(self.fabric, self.folder)
            for agent in self.agents:
                stack.callback(agent.stop)
                agent.start()
            for agent in self.agents:
                agent.ready()
            if self._with_prometheus:
                stack.callback(self.prometheus.stop)
                self.prometheus.start(self.fabric.hosts)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def diagnose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `railscope diagnose` against this cluster's Prometheus, as a person on the management network would."""
        command = ["ip", "netns", "exec", self.fabric.switch, str(RAILSCOPE), "diagnose"]
        command += ["--prometheus", self.prometheus.url, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
