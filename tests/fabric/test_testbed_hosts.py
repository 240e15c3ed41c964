"""Fabrics come, do what they are told, and go: also when their owner is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from railscope.testbed.hosts import OWNERS_DIRECTORY, Fabric, TestbedError, remove_leftovers
from railscope.testbed.namespaces import NAMESPACES_DIRECTORY

pytestmark = [pytest.mark.root, pytest.mark.fabric]

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import sys, time
from railscope.testbed.hosts import Fabric
with Fabric(hosts=1, rails=1) as fabric:
    print(fabric.suffix, flush=True)
    time.sleep(60)
"""


def namespaces(suffix: str) -> list[str]:
    return [path.name for path in NAMESPACES_DIRECTORY.glob(f"*{suffix}*")]


def end_owner(number: signal.Signals) -> tuple[str, int]:
    """Start another process with a fabric, end it by a signal; its fabric's suffix and its exit status."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        suffix = owner.stdout.readline().strip()
        assert namespaces(suffix)
        owner.send_signal(number)
        return suffix, owner.wait(timeout=20)


def test_every_host_reaches_its_rail_mates_and_nothing_is_said_on_a_quiet_rail(two_hosts: Fabric) -> None:
    first, second = two_hosts.hosts
    for address, rail in zip(second.addresses, first.rails, strict=True):
        route = json.loads(
            subprocess.run(first.command("ip", "-j", "route", "get", address), check=True, capture_output=True).stdout
        )
        assert route[0]["dev"] == rail
    assert two_hosts.counters(0, 0).transmit_packets == 0
    addresses = subprocess.run(first.command("ip", "-6", "address"), check=True, capture_output=True, text=True).stdout
    assert "inet6" not in addresses.replace("inet6 ::1", "")


def test_a_rail_can_be_shaped_and_freed(two_hosts: Fabric) -> None:
    def qdisc() -> str:
        command = ["tc", "-n", two_hosts.hosts[0].namespace, "qdisc", "show", "dev", "rail1"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    two_hosts.shape(0, 1, 50)
    assert "tbf" in qdisc()
    assert "50Mbit" in qdisc()
    two_hosts.shape(0, 1, 20)
    assert "20Mbit" in qdisc()
    two_hosts.shape(0, 1, None)
    assert "tbf" not in qdisc()


def test_a_rail_goes_down_and_comes_up(two_hosts: Fabric) -> None:
    def state() -> str:
        command = ["ip", "-n", two_hosts.hosts[1].namespace, "-j", "link", "show", "rail0"]
        flags = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["flags"]
        return "up" if "UP" in flags else "down"

    two_hosts.set_link(1, 0, up=False)
    assert state() == "down"
    two_hosts.set_link(1, 0, up=True)
    assert state() == "up"


def test_a_failure_inside_leaves_nothing_behind() -> None:
    fabric = Fabric(hosts=2, rails=1)
    sleepers = []

    def use() -> None:
        with fabric:
            command = fabric.hosts[0].command("sh", "-c", "echo inside; exec sleep 60")
            sleeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            sleepers.append(sleeper)
            # One that is still on its way into the namespace is nothing of the fabric's yet.
            assert sleeper.stdout is not None
            with sleeper.stdout:
                assert sleeper.stdout.readline() == "inside\n"
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        use()
    (sleeper,) = sleepers
    assert sleeper.wait(timeout=20) == -signal.SIGKILL
    assert namespaces(fabric.suffix) == []
    assert not (OWNERS_DIRECTORY / fabric.suffix).exists()


def test_a_failure_while_it_is_made_leaves_nothing_behind() -> None:
    fabric = Fabric(hosts=2, rails=1)
    subprocess.run(["ip", "netns", "add", fabric.hosts[1].namespace], check=True)  # in the way
    with pytest.raises(TestbedError, match="netns"), fabric:
        pass
    assert namespaces(fabric.suffix) == []


def test_sigterm_unwinds_the_owner() -> None:
    suffix, status = end_owner(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert namespaces(suffix) == []


def test_ctrl_c_unwinds_the_owner() -> None:
    suffix, _ = end_owner(signal.SIGINT)
    assert namespaces(suffix) == []


def test_what_a_killed_owner_left_is_removed_and_the_living_are_spared(two_hosts: Fabric) -> None:
    suffix, status = end_owner(signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert namespaces(suffix)
    assert suffix in remove_leftovers()
    assert namespaces(suffix) == []
    assert len(namespaces(two_hosts.suffix)) == 3


def test_who_sees_other_pids_takes_nothing_away(two_hosts: Fabric) -> None:
    """In a container the owner's number is nobody's, or another process's."""
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    program = "from railscope.testbed.hosts import remove_leftovers; print(remove_leftovers())"
    done = subprocess.run([*apart, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert two_hosts.suffix not in done.stdout
    assert len(namespaces(two_hosts.suffix)) == 3


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TestbedError, match="root"), Fabric():
        pass


def test_without_iproute2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(TestbedError, match="iproute2"), Fabric():
        pass
