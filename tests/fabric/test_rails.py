"""Eight rails sampled every millisecond, for real: shaped traffic, flapping links, a rail that is made again.

What the watch says is compared with what the kernel says through `ip`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.node.rails.netdev_rails import NetdevRails
from railscope.agent.node.sampling.state import SourceResult
from railscope.probes.clock import SystemClock
from railscope.probes.processes.namespaces import NetworkNamespace, network_namespace
from railscope.testbed.hosts import Fabric
from tests.fabric.agent_process import AgentProcess
from tests.fabric.talkers import SEND, SERVE, Talker

pytestmark = [pytest.mark.root, pytest.mark.fabric]

PROCFS, SYSFS = Path("/proc"), Path("/sys")
MEBIBYTE = 1 << 20
RAILS = 8
SAMPLE_INTERVAL_NS = 1_000_000
WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(hosts=2, rails=RAILS) as made:
        yield made


class Watched:
    """The first host's rails as a watch sees them, with a process there that sends to the second host."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.host, self.peer = fabric.hosts
        self._open = contextlib.ExitStack()
        self.talker(self.peer.command(sys.executable, "-c", SERVE, *self.peer.addresses))
        self.senders = [self.talker(self.host.command(sys.executable, "-c", SEND)) for _ in range(RAILS)]
        namespace: NetworkNamespace = network_namespace(PROCFS, self.senders[0].pid)
        self.watch = NetdevRails(
            SystemClock(),
            procfs=PROCFS,
            sysfs=SYSFS,
            sample_interval_ns=SAMPLE_INTERVAL_NS,
            window_ns=1_000_000_000,
            lifetime_ns=60_000_000_000,
            patterns=(),
        )
        self._open.callback(self.watch.close)
        self.watch.start()
        events = self.watch.add_process(self.senders[0].pid, namespace, "rail")
        assert events is not None
        self.events = events

    def talker(self, command: list[str]) -> Talker:
        talker = Talker(command)
        self._open.callback(talker.end)
        return talker

    def rails(self) -> dict[str, RailFacts]:
        self.watch.handle_link_events(self.events)
        return {facts.device: facts for facts in self.watch.rails()}

    def transmitted(self, device: str) -> int | None:
        facts = self.rails().get(device)
        return facts.transmit_bytes if facts else None

    def carrier_changes(self) -> dict[str, int]:
        return {
            device: value
            for device, facts in self.rails().items()
            for counter, _, value in facts.counters
            if counter == "carrier_changes"
        }

    def kernels_carrier_changes(self) -> dict[str, int]:
        files = [f"/sys/class/net/{rail}/carrier_changes" for rail in self.host.rails]
        shown = subprocess.run(self.host.command("cat", *files), capture_output=True, text=True, check=True).stdout
        return dict(zip(self.host.rails, map(int, shown.split()), strict=True))

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def watched(fabric: Fabric) -> Iterator[Watched]:
    made = Watched(fabric)
    yield made
    made.close()


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_bytes_of_eight_shaped_rails_are_the_kernels_to_the_byte(watched: Watched) -> None:
    fabric = watched.fabric
    amounts = {rail: (rail + 1) * MEBIBYTE // 2 for rail in range(RAILS)}
    for rail in range(RAILS):
        fabric.shape(0, rail, 100 + 50 * rail)
    try:
        before = {rail: fabric.counters(0, rail).transmit_bytes for rail in range(RAILS)}
        until(lambda: watched.rails().keys() == set(watched.host.rails), "all rails are seen")
        for rail, sender in enumerate(watched.senders):
            sender.begin(watched.peer.addresses[rail], amounts[rail])
        for sender in watched.senders:
            sender.expect("sent")
        until(
            lambda: all(fabric.counters(1, rail).receive_bytes >= amounts[rail] for rail in range(RAILS)),
            "everything has arrived",
        )

        def equal() -> bool:
            """At one moment: an acknowledgement may still be on its way."""
            kernels = {f"rail{rail}": fabric.counters(0, rail) for rail in range(RAILS)}
            rails = watched.rails()
            return all(
                (facts.transmit_bytes, facts.receive_bytes) == (counted.transmit_bytes, counted.receive_bytes)
                for facts, counted in ((rails[name], kernels[name]) for name in kernels)
            )

        until(equal, "the watch and the kernel agree")
        rails = watched.rails()
    finally:
        for rail in range(RAILS):
            fabric.shape(0, rail, None)
    assert [rails[f"rail{rail}"].rail for rail in range(RAILS)] == [str(rail) for rail in range(RAILS)]
    for rail in range(RAILS):
        facts = rails[f"rail{rail}"]
        assert facts.transmit_bytes is not None
        # Headers, and what little was sent again.
        assert amounts[rail] <= facts.transmit_bytes - before[rail] < amounts[rail] * 1.2
        # Shaped traffic leaves in packets of 64 KiB: at this beat each shows as a burst, and silence between them.
        assert sum(facts.transmit_rate.counts[1:]) > 0
        assert facts.transmit_rate.counts[0] > 0


def test_reads_missed_while_the_agent_was_held_up_are_counted() -> None:
    interval_seconds = 0.001
    with AgentProcess("--no-collector.collective", "--rail.sample-interval", "1ms") as agent:

        def missed() -> float:
            ((_, value),) = agent.samples("railscope_collector_reads_missed_total", collector="netdev")
            return value

        agent.until(lambda: bool(agent.samples("railscope_rail_transmit_bytes_total")))
        before = missed()
        os.kill(agent.process.pid, signal.SIGSTOP)
        try:
            held_from = time.monotonic()
            time.sleep(0.3)
            held_seconds = time.monotonic() - held_from
        finally:
            os.kill(agent.process.pid, signal.SIGCONT)
        at_least = held_seconds / interval_seconds * 0.9
        agent.until(lambda: missed() - before >= at_least)
        assert agent.samples("railscope_collector_success", collector="netdev")[0][1] == 1


def result_of(watched: Watched) -> SourceResult:
    (result,) = watched.watch.source_results()
    return result


def test_every_beat_is_read_or_counted_as_missed_or_spared(watched: Watched) -> None:
    """However busy the machine is: what was due, and what came of it, add up."""
    clock = SystemClock()

    def accounted() -> tuple[int, int]:
        result = result_of(watched)
        return clock.monotonic_ns(), result.reads + result.ticks_missed + result.ticks_spared

    until(lambda: result_of(watched).reads > 100, "it is read")
    start_ns, first = accounted()
    until(lambda: result_of(watched).reads > 400, "it is read more often")

    def adds_up() -> bool:
        now_ns, beats = accounted()
        return abs((now_ns - start_ns) / SAMPLE_INTERVAL_NS - (beats - first)) <= 10

    until(adds_up, "the beats add up")


def test_every_flap_of_a_link_is_seen_and_its_siblings_have_none(watched: Watched) -> None:
    flaps = 12
    until(lambda: watched.carrier_changes() == watched.kernels_carrier_changes(), "all rails are seen")
    before = watched.carrier_changes()
    for _ in range(flaps):
        for state in ("down", "up"):
            subprocess.run(["ip", "-n", watched.fabric.switch, "link", "set", "host0rail3", state], check=True)
    until(lambda: watched.carrier_changes()["rail3"] == before["rail3"] + 2 * flaps, "every flap is counted")
    assert watched.carrier_changes() == watched.kernels_carrier_changes()
    assert watched.carrier_changes() == before | {"rail3": before["rail3"] + 2 * flaps}
    until(lambda: watched.rails()["rail3"].up is True, "it is up again")
    subprocess.run(["ip", "-n", watched.fabric.switch, "link", "set", "host0rail3", "down"], check=True)
    try:
        until(lambda: watched.rails()["rail3"].up is False, "it is seen down")
        assert watched.rails()["rail4"].up is True
    finally:
        subprocess.run(["ip", "-n", watched.fabric.switch, "link", "set", "host0rail3", "up"], check=True)


def test_a_rail_that_is_deleted_and_made_again_goes_on_counting_and_never_falls(watched: Watched) -> None:
    """Its siblings keep their numbers meanwhile."""
    host, switch = watched.host, watched.fabric.switch
    sender, address = watched.senders[5], watched.peer.addresses[5]
    sender.send(address, 2 * MEBIBYTE)
    sent = watched.fabric.counters(0, 5).transmit_bytes
    until(lambda: watched.transmitted("rail5") == sent, "what was sent is counted")
    changes = watched.carrier_changes()["rail5"]
    seen = [sent]

    def carried() -> int:
        now = watched.transmitted("rail5")
        seen.append(now if now is not None else seen[-1])
        return seen[-1]

    subprocess.run(["ip", "-n", host.namespace, "link", "del", "rail5"], check=True)
    until(lambda: "rail5" not in watched.rails(), "it is gone")
    assert {device: facts.rail for device, facts in watched.rails().items()} == {
        f"rail{rail}": str(rail) for rail in range(RAILS) if rail != 5
    }
    subprocess.run(
        ["ip", "-n", switch, "-batch", "-"],
        input=f"link add host0rail5 type veth peer name rail5 netns {host.namespace}\n"
        "link set host0rail5 master bridge5 up\n",
        text=True,
        check=True,
    )
    subprocess.run(
        ["ip", "-n", host.namespace, "-batch", "-"],
        input=f"address add {host.addresses[5]}/24 dev rail5\nlink set rail5 up\n",
        text=True,
        check=True,
    )
    until(lambda: watched.rails().get("rail5") is not None and carried() >= sent, "it is back, and has not fallen")
    assert watched.rails()["rail5"].rail == "5"
    again = watched.talker(host.command(sys.executable, "-c", SEND))
    base, kernels_base = carried(), watched.fabric.counters(0, 5).transmit_bytes
    assert base < sent + MEBIBYTE, "what the new device shows is its own"
    again.begin(address, 3 * MEBIBYTE)
    until(lambda: carried() - base >= 3 * MEBIBYTE, "it counts on")
    again.expect("sent")
    until(lambda: carried() - base == watched.fabric.counters(0, 5).transmit_bytes - kernels_base, "to the byte")
    assert seen == sorted(seen)
    assert watched.carrier_changes()["rail5"] >= changes
