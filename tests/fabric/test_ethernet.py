"""Queues and TCP connections of rails, for real: namespace hosts, real TCP traffic, a slowed and a filtered rail."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.snapshot import RailTcp
from railscope.agent.node.rails.ethernet import EthernetWatch
from railscope.agent.node.rails.ethernet_facts import RailEthernet
from railscope.agent.node.rails.selection import decide_rails
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.inventory import NetlinkInventory
from railscope.probes.processes.namespaces import NetworkNamespace, network_namespace, run_inside
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.fabric.talkers import SEND, SERVE, Talker

pytestmark = [pytest.mark.root, pytest.mark.fabric]

PROCFS, SYSFS = Path("/proc"), Path("/sys")
MEBIBYTE = 1 << 20
WAIT_SECONDS = 30


class Bench:
    """Two hosts, a server on the second, and a watch on the first."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._open = contextlib.ExitStack()
        self.server = self.talker(1, SERVE, *fabric.hosts[1].addresses)
        self.sender = self.talker(0, SEND)
        self.namespace: NetworkNamespace = network_namespace(PROCFS, self.sender.pid)
        self.clock = SystemClock()
        self.sampler = Sampler(self.clock)
        self.watch = EthernetWatch(self.clock, self.sampler, procfs=PROCFS, lifetime_ns=60_000_000_000)
        self._open.callback(self.sampler.stop)
        self._open.callback(self.watch.close)
        self.decisions = self.decide()

    def decide(self) -> tuple[RailDecision, ...]:
        def inventory() -> tuple[RailDecision, ...]:
            reader = NetlinkInventory(self.namespace.inode, SYSFS)
            with contextlib.closing(reader):
                return decide_rails(reader.read(), socket_interfaces={self.namespace.inode: ["rail"]})

        return run_inside(self.namespace, inventory)

    def talker(self, host: int, program: str, *arguments: str) -> Talker:
        command = self.fabric.hosts[host].command(sys.executable, "-c", program, *arguments)
        talker = Talker(command)
        self._open.callback(talker.end)
        return talker

    def read(self) -> dict[str, RailEthernet]:
        """Read everything now, however long ago the last time was: what is under way changes all the time."""
        self.watch.update(self.decisions)
        self.sampler.read_due(self.clock.monotonic_ns() + 60_000_000_000)
        self.watch.update(self.decisions)
        return {fact.device: fact for fact in self.watch.facts()}

    def tcp(self, device: str) -> RailTcp:
        found = self.read()[device].tcp
        assert found is not None
        return found

    def until(self, true: Callable[[dict[str, RailEthernet]], bool]) -> dict[str, RailEthernet]:
        """Facts for which this holds, or the last ones when it never does."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not true(facts := self.read()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert true(facts), facts
        return facts

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def bench(two_hosts: Fabric) -> Iterator[Bench]:
    made = Bench(two_hosts)
    yield made
    made.close()


def acked(facts: dict[str, RailEthernet], device: str) -> int:
    tcp = facts[device].tcp
    return tcp.acknowledged_bytes if tcp else 0


def test_bytes_of_the_observed_process_are_counted_exactly_on_the_rail_that_carried_them(bench: Bench) -> None:
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    bench.read()
    bench.sender.send("10.77.0.2", 3 * MEBIBYTE)
    bench.sender.send("10.77.1.2", MEBIBYTE)
    facts = bench.until(lambda found: acked(found, "rail0") + acked(found, "rail1") >= 4 * MEBIBYTE)
    for device, count in (("rail0", 3 * MEBIBYTE), ("rail1", MEBIBYTE)):
        tcp = facts[device].tcp
        assert tcp is not None
        # The kernel counts the acknowledgement of the handshake as a byte.
        assert tcp.acknowledged_bytes - count in (0, 1)
        assert tcp.sent_bytes - tcp.retransmitted_bytes == count
        assert (tcp.connections, tcp.received_bytes) == (1, 0)
        assert tcp.data_segments > 0
    assert {fact.rail for fact in facts.values()} == {"0", "1"}
    assert all(result.success for result in bench.watch.collectors()), bench.watch.collectors()


def test_connections_of_other_processes_on_the_same_rail_are_not_counted(bench: Bench) -> None:
    other = bench.talker(0, SEND)
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    bench.sender.send("10.77.0.2", 1)
    bench.read()
    other.send("10.77.0.2", 4 * MEBIBYTE)
    bench.sender.send("10.77.0.2", MEBIBYTE)
    facts = bench.until(lambda found: acked(found, "rail0") >= MEBIBYTE)
    tcp = facts["rail0"].tcp
    assert tcp is not None
    assert tcp.connections == 1
    assert tcp.acknowledged_bytes == MEBIBYTE
    bench.watch.add_process(other.pid, bench.namespace)
    assert bench.tcp("rail0").connections == 2
    # What it did since the rail was first read is its own, and the kernel counts its SYN.
    assert bench.tcp("rail0").acknowledged_bytes == 5 * MEBIBYTE + 1
    bench.watch.remove_process(other.pid)

    def observed(found: dict[str, RailEthernet]) -> int:
        tcp = found["rail0"].tcp
        return tcp.connections if tcp else 0

    # Until it is found out whose it is now, a connection stays whose it was.
    bench.until(lambda found: observed(found) == 1)


def test_a_connection_that_came_and_grew_between_two_reads_is_counted_whole(bench: Bench) -> None:
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    assert bench.tcp("rail1").connections == 0
    bench.sender.send("10.77.1.2", MEBIBYTE)
    bench.until(lambda found: acked(found, "rail1") >= MEBIBYTE)


@contextlib.contextmanager
def kept_busy(talker: Talker, address: str) -> Iterator[None]:
    """Let it send to an address without a pause."""
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            talker.send(address, MEBIBYTE // 2)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        stop.set()
        sending.join()


def slower(slowed: RailEthernet, sibling: RailEthernet) -> bool:
    """Whether queue, round trips and rates all tell the slowed rail from its sibling."""
    if slowed.queue is None or slowed.tcp is None or sibling.tcp is None:
        return False
    long, short = slowed.tcp.round_trip_mean_seconds, sibling.tcp.round_trip_mean_seconds
    low, high = slowed.tcp.delivery_rate_bytes_per_second, sibling.tcp.delivery_rate_bytes_per_second
    if long is None or short is None or low is None or high is None:
        return False
    return slowed.queue.backlog_bytes > 20_000 and long > 3 * short and 2 * low < high


def test_a_slowed_rail_shows_its_queue_and_its_round_trips_and_its_sibling_does_not(bench: Bench) -> None:
    second = bench.talker(0, SEND)
    for talker in (bench.sender, second):
        bench.watch.add_process(talker.pid, bench.namespace)
    bench.read()
    bench.fabric.shape(0, 1, 50)
    try:
        with kept_busy(bench.sender, "10.77.1.2"), kept_busy(second, "10.77.0.2"):
            # A queue is there at once, and whether it had to wait shows a moment later.
            facts = bench.until(
                lambda found: (
                    slower(found["rail1"], found["rail0"])
                    and (queue := found["rail1"].queue) is not None
                    and queue.overlimits > 0
                )
            )
    finally:
        bench.fabric.shape(0, 1, None)
    slowed, sibling = facts["rail1"], facts["rail0"]
    assert slowed.queue is not None
    assert sibling.queue is not None
    assert (slowed.queue.discipline, sibling.queue.discipline) == ("tbf", "noqueue")
    assert slowed.queue.queued_packets > 0
    assert (sibling.queue.backlog_bytes, sibling.queue.overlimits) == (0, 0)
    assert slowed.tcp is not None
    assert slowed.tcp.unacknowledged_segments > 0
    assert slowed.tcp.busy_seconds > 0
    # 50 Mbit/s, and some for what TCP measures over short times.
    assert (slowed.tcp.delivery_rate_bytes_per_second or 0) < 20_000_000


def test_the_slowed_rail_of_a_collective_job_is_told_though_bytes_on_both_rails_are_the_same(bench: Bench) -> None:
    """A ring is lock-step: only queue and round trips name the sick rail."""
    bench.fabric.shape(0, 1, 100)
    try:
        with Job(bench.fabric.hosts, JobOptions(pattern="ddp", seconds=WAIT_SECONDS)) as job:
            pid = job.pids[0]
            bench.watch.add_process(pid, bench.namespace)

            def told(found: dict[str, RailEthernet]) -> bool:
                slowed, sibling = found["rail1"], found["rail0"]
                if slowed.queue is None or sibling.queue is None or slowed.tcp is None or sibling.tcp is None:
                    return False
                long, short = slowed.tcp.round_trip_mean_seconds, sibling.tcp.round_trip_mean_seconds
                waits = slowed.queue.backlog_bytes > 0 and sibling.queue.backlog_bytes == 0
                return waits and sibling.tcp.sent_bytes > MEBIBYTE and long is not None and long > 3 * (short or 1)

            facts = bench.until(told)
    finally:
        bench.fabric.shape(0, 1, None)
    slowed, sibling = facts["rail1"].tcp, facts["rail0"].tcp
    assert slowed is not None
    assert sibling is not None
    assert slowed.connections >= 1
    assert slowed.busy_seconds > sibling.busy_seconds


def test_what_a_filter_drops_is_counted_as_retransmitted_on_that_rail_only(bench: Bench) -> None:
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    bench.sender.send("10.77.0.2", 1)
    bench.sender.send("10.77.1.2", 1)
    bench.read()
    namespace = bench.fabric.hosts[1].namespace
    # On the receiver: what the sender's own filter drops, its TCP notices at once.
    rules = (
        "add table inet lossy; add chain inet lossy input { type filter hook input priority 0; }; "
        'add rule inet lossy input iifname "rail1" tcp dport 5001 drop'
    )
    subprocess.run(["ip", "netns", "exec", namespace, "nft", rules], check=True, capture_output=True)
    try:
        bench.sender.send("10.77.1.2", 20_000)
        bench.sender.send("10.77.0.2", 20_000)

        def lost(found: dict[str, RailEthernet]) -> bool:
            tcp = found["rail1"].tcp
            return tcp is not None and tcp.retransmitted_segments >= 2

        facts = bench.until(lost)
    finally:
        subprocess.run(["ip", "netns", "exec", namespace, "nft", "delete table inet lossy"], check=True)
    dropped, sibling = facts["rail1"].tcp, facts["rail0"].tcp
    assert dropped is not None
    assert sibling is not None
    assert dropped.retransmitted_bytes > 0
    assert dropped.unacknowledged_segments > 0
    assert (sibling.retransmitted_segments, sibling.retransmitted_bytes) == (0, 0)
    bench.until(lambda found: acked(found, "rail1") >= 20_000)


def test_what_a_full_queue_of_the_tree_drops_is_counted_at_the_root(bench: Bench) -> None:
    host = bench.fabric.hosts[0]
    tree = (
        "qdisc add dev rail0 root handle 1: tbf rate 1mbit burst 16kb limit 60kb\n"
        "qdisc add dev rail0 parent 1:1 handle 20: bfifo limit 20kb\n"
    )
    subprocess.run(["tc", "-n", host.namespace, "-batch", "-"], input=tree, text=True, check=True)

    def flood() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for _ in range(200):
                udp.sendto(bytes(1400), ("10.77.0.2", 9))

    try:
        bench.watch.add_process(bench.sender.pid, bench.namespace)
        before = bench.read()["rail0"].queue
        assert before is not None
        assert before.drops == 0
        run_inside(bench.namespace, flood)
        facts = bench.read()
        full, sibling = facts["rail0"].queue, facts["rail1"].queue
        assert full is not None
        assert sibling is not None
        assert full.discipline == "tbf"
        # 36 kB pass or wait, and a little more while they are sent.
        assert 100 < full.drops < 200
        assert 0 < full.backlog_bytes <= 20 * 1024
        assert sibling.drops == 0
    finally:
        subprocess.run(["tc", "-n", host.namespace, "qdisc", "del", "dev", "rail0", "root"], check=True)


def test_a_rail_that_vanishes_fails_alone_and_its_totals_stay(bench: Bench) -> None:
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    bench.read()
    bench.sender.send("10.77.0.2", MEBIBYTE)
    bench.until(lambda found: acked(found, "rail0") >= MEBIBYTE)
    host = bench.fabric.hosts[0]
    subprocess.run(["ip", "-n", host.namespace, "link", "set", "rail1", "down"], check=True)
    subprocess.run(["ip", "-n", host.namespace, "link", "set", "rail1", "name", "away1"], check=True)
    try:
        facts = bench.read()
        assert acked(facts, "rail0") >= MEBIBYTE
        assert facts["rail1"].queue is None
        assert not all(result.success for result in bench.watch.collectors())
    finally:
        subprocess.run(["ip", "-n", host.namespace, "link", "set", "away1", "name", "rail1"], check=True)
        subprocess.run(["ip", "-n", host.namespace, "link", "set", "rail1", "up"], check=True)
    facts = bench.read()
    assert facts["rail1"].queue is not None
    assert all(result.success for result in bench.watch.collectors())


def test_sources_are_awaited_until_they_were_read_with_the_rails_known(bench: Bench) -> None:
    """As for `agent --once`: before that a read finds nothing to read."""
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    assert len(bench.watch.unread_sources()) == 3
    bench.sampler.read_due(bench.clock.monotonic_ns())
    assert bench.watch.unread_sources() == ()
    bench.watch.update(bench.decisions)
    assert len(bench.watch.unread_sources()) == 3
    bench.sampler.read_due(bench.clock.monotonic_ns() + 60_000_000_000)
    assert bench.watch.unread_sources() == ()


def test_facts_outlive_the_last_process_of_a_namespace_and_no_socket_keeps_it(bench: Bench) -> None:
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    bench.read()
    bench.sender.send("10.77.0.2", MEBIBYTE)
    bench.until(lambda found: acked(found, "rail0") >= MEBIBYTE)
    bench.sender.end()
    bench.watch.remove_process(bench.sender.pid)
    assert bench.sampler.state().results == ()
    assert acked(bench.read(), "rail0") >= MEBIBYTE


def test_totals_go_on_where_the_last_process_of_a_namespace_left_them(bench: Bench) -> None:
    """A job that follows another within seconds finds the accounts of its rails as they were: below them is no byte."""
    first = bench.talker(0, SEND)
    bench.watch.add_process(first.pid, network_namespace(PROCFS, first.pid))
    bench.read()
    first.send("10.77.0.2", 2 * MEBIBYTE)
    bench.until(lambda found: acked(found, "rail0") >= 2 * MEBIBYTE)
    first.end()
    bench.watch.remove_process(first.pid)
    assert bench.sampler.state().results == ()
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    assert acked(bench.read(), "rail0") >= 2 * MEBIBYTE
    bench.sender.send("10.77.0.2", MEBIBYTE)
    bench.until(lambda found: acked(found, "rail0") >= 3 * MEBIBYTE)


def test_a_process_that_has_gone_before_it_was_read_fails_its_sources_alone(bench: Bench) -> None:
    short = bench.talker(1, SEND)
    gone = network_namespace(PROCFS, short.pid)
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    short.end()
    bench.watch.add_process(short.pid, gone)
    bench.read()
    results = {result.collector: result.success for result in bench.watch.collectors()}
    here, there = f"net:[{bench.namespace.inode}]", f"net:[{gone.inode}]"
    assert results == {
        f"{name} {where}": where == here for name in ("ethtool", "qdisc", "tcp") for where in (here, there)
    }


def without_entering(function: Callable[[], object]) -> None:
    """Run it as an agent without CAP_SYS_ADMIN: the capability leaves a thread that then ends."""

    def drop_and_run() -> None:
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, data) == 0
        data[0] &= ~(1 << 21)
        assert libc.capset(header, data) == 0
        function()

    thread = threading.Thread(target=drop_and_run)
    thread.start()
    thread.join()


def test_without_the_right_to_enter_its_sources_fail_with_one_line_each_and_come_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    own = network_namespace(PROCFS, "self")
    bench.watch.watch_own(own)
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    for _ in range(3):
        without_entering(bench.read)
    there = f"net:[{bench.namespace.inode}]"
    assert {result.collector: result.success for result in bench.watch.collectors()} == {
        **dict.fromkeys(("ethtool", "qdisc", "tcp"), True),
        **{f"{name} {there}": False for name in ("ethtool", "qdisc", "tcp")},
    }
    said = [record.message for record in caplog.records if "grant CAP_SYS_ADMIN" in record.message]
    assert len(said) == 3
    assert {facts.tcp for facts in bench.watch.facts()} == {None}
    bench.sender.send("10.77.0.2", 1)
    assert bench.tcp("rail0").connections == 1
    assert all(result.success for result in bench.watch.collectors())


def test_a_namespace_is_reached_through_another_process_when_the_first_has_gone(bench: Bench) -> None:
    first = bench.talker(0, SEND)
    bench.watch.add_process(first.pid, network_namespace(PROCFS, first.pid))
    bench.watch.add_process(bench.sender.pid, bench.namespace)
    first.end()
    bench.sender.send("10.77.1.2", 1)
    assert bench.tcp("rail1").connections == 1
