"""Switches that say who they are, for real: LLDP on the cables of a namespace host, heard by the agent."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from railscope.agent.dataset.reader import open_dataset
from railscope.agent.node.fabric.neighbours import Neighbours
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.lldp import ETHERTYPE, NEAREST_BRIDGE
from railscope.probes.processes.namespaces import NetworkNamespace, run_inside
from railscope.testbed.hosts import Fabric
from railscope.testbed.namespaces import NAMESPACES_DIRECTORY
from tests.fabric.agent_process import RAILSCOPE, metrics_of
from tests.unit.test_lldp import frame
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric]

SOURCE = bytes.fromhex("020000000001")


@contextmanager
def speaking(fabric: Fabric) -> Iterator[None]:
    """The switch's end of the first host's first rail says the same again and again; real ones do so every 30 s."""
    ending = threading.Event()

    def open_socket() -> socket.socket:
        sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        sender.bind((fabric.port(0, 0), 0))
        return sender

    with run_inside(namespace_of(fabric.switch), open_socket) as sender:

        def send() -> None:
            while not ending.wait(0.2):
                sender.send(NEAREST_BRIDGE + SOURCE + ETHERTYPE.to_bytes(2, "big") + frame())

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()


def test_a_rail_knows_its_switch_and_one_that_hears_nothing_has_none() -> None:
    command = [str(RAILSCOPE), "agent", "--once", "--once.settle", "6s", "--no-collector.collective"]
    with Fabric(hosts=1, rails=2) as fabric, speaking(fabric):
        inside = ["ip", "netns", "exec", fabric.hosts[0].namespace]
        done = subprocess.run(
            [*inside, *command, "--rail.devices", "rail*"], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    heard = [labels for name, labels, _ in metrics_of(done.stdout) if name == "railscope_rail_switch_info"]
    assert heard == [{"rail": "0", "device": "rail0", "switch": "leaf-a", "switch_port": "Ethernet1/3"}]


def test_a_recording_names_the_switch_of_each_rail_that_heard_one(tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    command = [str(RAILSCOPE), "record", "-o", str(dataset), "--seconds", "6", "--no-collector.collective"]
    with Fabric(hosts=1, rails=2) as fabric, speaking(fabric):
        inside = ["ip", "netns", "exec", fabric.hosts[0].namespace]
        done = subprocess.run(
            [*inside, *command, "--rail.devices", "rail*"], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    opened = open_dataset([dataset])
    rows = opened.rows(opened["rails"]).to_pylist()
    assert sorted((row["device"], row["switch"], row["switch_port"]) for row in rows) == [
        ("rail0", "leaf-a", "Ethernet1/3"),
        ("rail1", None, None),
    ]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that lldpd may enter, which gives up root's rights."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_what_lldpd_says_is_understood(open_folder: Path) -> None:
    program = shutil.which("lldpd")
    if program is None:
        pytest.skip("lldpd is not installed")
    settings = open_folder / "lldpd.conf"
    settings.write_text("configure lldp tx-interval 1\nconfigure lldp portidsubtype ifname\n")
    with Fabric(hosts=1, rails=2) as fabric:
        port, namespace = fabric.port(0, 1), namespace_of(fabric.hosts[0].namespace)
        command = ["ip", "netns", "exec", fabric.switch, program, "-d", "-c", "-I", port, "-C", port, "-S", "leaf-b"]
        command += ["-O", str(settings), "-u", str(open_folder / "socket")]
        neighbours = Neighbours(SystemClock())

        def heard() -> bool:
            run_inside(namespace, lambda: neighbours.update([("0", "rail0"), ("1", "rail1")]))
            return bool(neighbours.facts)

        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
            try:
                eventually(heard)
                (found,) = neighbours.facts
            finally:
                daemon.terminate()
                neighbours.close()
    assert (found.rail, found.device, found.port) == ("1", "rail1", port)
    assert found.switch


def namespace_of(name: str) -> NetworkNamespace:
    path = NAMESPACES_DIRECTORY / name
    return NetworkNamespace(path.stat().st_ino, path, own=False)
