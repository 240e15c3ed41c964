"""Faults break what they say, nothing beside it, and leave no trace."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from railscope.testbed.faults import Fault, FilteredRail, ForeignTraffic, Killed, LinkDown, SlowRail, Starved, Stopped
from railscope.testbed.hosts import MANAGEMENT_SWITCH_ADDRESS, Fabric, Host, TestbedError
from railscope.testbed.namespaces import entered, tcp_socket
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric]


def reaches(source: Host, address: str) -> bool:
    """Whether anybody at the address at least refuses a connection."""
    with tcp_socket(source.namespace) as client:
        client.settimeout(1.5)
        try:
            client.connect((address, 1))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return True


def connects(source: Host, target: Host, rail: int) -> bool:
    """Whether a TCP connection can be made on one rail, within a second and a half."""
    with tcp_socket(target.namespace) as listener, tcp_socket(source.namespace) as client:
        listener.bind((target.addresses[rail], 0))
        listener.listen(1)
        client.settimeout(1.5)
        try:
            client.connect(listener.getsockname())
        except OSError:
            return False
        return True


def link(fabric: Fabric, host: int, rail: int) -> str:
    command = ["ip", "-n", fabric.hosts[host].namespace, "-j", "link", "show", fabric.rail_names[rail]]
    flags = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["flags"]
    return "up" if "LOWER_UP" in flags else "down"


def queue(namespace: str, device: str) -> str:
    command = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def own_namespace() -> str:
    return str(Path("/proc/thread-self/ns/net").readlink())


def test_a_link_is_down_for_as_long_as_the_fault_lasts(two_hosts: Fabric) -> None:
    with LinkDown(two_hosts, 1, 1) as fault:
        assert (link(two_hosts, 1, 1), link(two_hosts, 1, 0)) == ("down", "up")
        fault.undo()
        assert link(two_hosts, 1, 1) == "up"
    assert link(two_hosts, 1, 1) == "up"


def test_a_fault_is_undone_when_the_block_fails(two_hosts: Fabric) -> None:
    with pytest.raises(RuntimeError, match="inside"), LinkDown(two_hosts, 0, 0):
        raise RuntimeError("inside")
    assert link(two_hosts, 0, 0) == "up"


def test_a_fault_that_was_never_injected_is_undone_without_harm(two_hosts: Fabric) -> None:
    two_hosts.set_link(0, 0, up=False)
    LinkDown(two_hosts, 0, 0).undo()
    assert link(two_hosts, 0, 0) == "down"
    two_hosts.set_link(0, 0, up=True)


def test_a_slow_rail_has_a_tenth_of_its_rate_and_gets_it_back(two_hosts: Fabric) -> None:
    namespace = two_hosts.hosts[1].namespace
    two_hosts.shape(1, 0, 400)
    with SlowRail(two_hosts, 1, 0):
        assert "rate 40Mbit" in queue(namespace, "rail0")
    assert "rate 400Mbit" in queue(namespace, "rail0")
    two_hosts.shape(1, 0, None)
    with SlowRail(two_hosts, 1, 0, rate_mbit=30):
        assert "rate 30Mbit" in queue(namespace, "rail0")
    assert "tbf" not in queue(namespace, "rail0")


def test_a_rail_that_is_slow_in_the_switch_shows_no_queue_on_the_host(two_hosts: Fabric) -> None:
    with SlowRail(two_hosts, 1, 0, rate_mbit=30, in_switch=True):
        assert "rate 30Mbit" in queue(two_hosts.switch, two_hosts.port(1, 0))
        assert "tbf" not in queue(two_hosts.hosts[1].namespace, "rail0")
    assert "tbf" not in queue(two_hosts.switch, two_hosts.port(1, 0))


def test_an_unshaped_rail_has_no_rate_to_take_a_tenth_of(two_hosts: Fabric) -> None:
    with pytest.raises(TestbedError, match="shape it first"):
        SlowRail(two_hosts, 0, 0)


@pytest.mark.parametrize("in_switch", [False, True])
def test_a_filtered_rail_stays_up_and_carries_nothing(two_hosts: Fabric, in_switch: bool) -> None:
    first, second = two_hosts.hosts
    assert connects(second, first, 1)
    with FilteredRail(two_hosts, 1, 1, in_switch=in_switch) as fault:
        assert not connects(second, first, 1)
        assert connects(second, first, 0)
        assert link(two_hosts, 1, 1) == "up"
        fault.undo()
        assert connects(second, first, 1)
    assert connects(second, first, 1)
    rules = ["ip", "netns", "exec", two_hosts.switch if in_switch else second.namespace, "nft", "list", "tables"]
    assert subprocess.run(rules, check=True, capture_output=True, text=True).stdout == ""


def test_a_stopped_process_goes_on() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        with Stopped(process.pid):
            eventually(lambda: state(process.pid) == "T")
        eventually(lambda: state(process.pid) != "T")
        process.kill()
    Stopped(process.pid).undo()  # it has gone


def test_a_killed_process_has_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        with Killed(process.pid):
            eventually(lambda: state(process.pid) == "Z")
        assert process.wait() == -9


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_starved_process_gets_hardly_any_processor_and_then_its_share_again() -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as process:
        before = Path(f"/proc/{process.pid}/cgroup").read_text()
        with Starved(process.pid):
            assert Path(f"/proc/{process.pid}/cgroup").read_text() != before
            time.sleep(1.1)  # what it had left of its first second
            started = cpu_seconds(process.pid)
            time.sleep(2)
            assert cpu_seconds(process.pid) - started < 0.2
        assert Path(f"/proc/{process.pid}/cgroup").read_text() == before
        started = cpu_seconds(process.pid)
        eventually(lambda: cpu_seconds(process.pid) - started > 0.1)
        process.kill()
    assert not list(Path("/sys/fs/cgroup").glob("**/railscope-starved-*"))


def test_a_process_that_has_gone_cannot_be_starved() -> None:
    with pytest.raises(TestbedError, match="has no control group"), Starved(2**22 - 1):
        pass


def test_foreign_traffic_is_of_known_size_and_on_one_rail(two_hosts: Fabric) -> None:
    first, second = two_hosts.hosts
    before = [two_hosts.counters(0, rail).transmit_bytes for rail in (0, 1)]
    with ForeignTraffic(first, second, 1, 8 << 20) as stream:
        stream.wait(20)
    rises = [two_hosts.counters(0, rail).transmit_bytes - was for rail, was in zip((0, 1), before, strict=True)]
    assert 8 << 20 <= rises[1] <= (8 << 20) * 1.06
    assert rises[0] < 1000


def test_foreign_traffic_can_be_ended_before_its_end(two_hosts: Fabric) -> None:
    with ForeignTraffic(two_hosts.hosts[0], two_hosts.hosts[1], 0, 1 << 40, rate_mbit=10) as stream:
        eventually(lambda: stream.received_bytes > 0)
        with pytest.raises(TestbedError, match="bytes arrived"):
            stream.wait(0.05)
    assert stream.received_bytes < 1 << 30


def test_a_fault_that_cannot_be_injected_leaves_nothing_behind() -> None:
    undone = []

    class Half(Fault):
        def _break(self) -> None:
            raise TestbedError("half way")

        def _mend(self) -> None:
            undone.append(True)

    with pytest.raises(TestbedError, match="half way"), Half():
        pass
    assert undone == [True]


def test_the_management_network_reaches_every_host_and_is_no_rail() -> None:
    with Fabric(hosts=2, rails=1, management=True) as fabric:
        assert [host.management_address for host in fabric.hosts] == ["10.78.0.1", "10.78.0.2"]
        with LinkDown(fabric, 1, 0):
            assert reaches(fabric.hosts[1], MANAGEMENT_SWITCH_ADDRESS)
            assert not reaches(fabric.hosts[1], fabric.hosts[0].addresses[0])
        assert all(host.rails == ("rail0",) for host in fabric.hosts)


def test_a_thread_comes_back_from_the_namespace_it_entered(two_hosts: Fabric) -> None:
    own = own_namespace()
    with entered(two_hosts.hosts[0].namespace):
        assert own_namespace() != own
    assert own_namespace() == own


def test_there_is_no_socket_in_a_namespace_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        tcp_socket("railscope-no-such-namespace")
