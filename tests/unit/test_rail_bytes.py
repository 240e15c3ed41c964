"""What was handed to each rail is counted once, under its right name, and never falls (simulated readings)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.completion.handed_over import MOST_TRIES, HandedOver, RailBytes, SentRail
from railscope.agent.node.inspection.questions import Refused
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.memory.net_devices import NetDevice
from railscope.probes.nccl.programs.internals import Sent
from railscope.probes.nccl.records.internals import NO_NET_DEVICE, NetworkKind
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.processes import ProcessIdentity

SOCKET, IB = NetworkKind.SOCKET, NetworkKind.IB
RAIL0, RAIL1 = NetDevice(SOCKET, 0, "rail0", None), NetDevice(SOCKET, 1, "rail1", None)
ADAPTER = NetDevice(IB, 0, "mlx5_0", 2)


class Node:
    """Totals beside a simulated kernel and simulated processes."""

    def __init__(self) -> None:
        self.processes: dict[int, ObservedProcess] = {}
        self.devices: dict[int, tuple[NetDevice, ...]] = {}
        """By pid; a process that is missing here cannot be read."""
        self.asked: list[int] = []
        self.rows: dict[tuple[int, NetworkKind, int], Sent] = {}
        self.rails = RailBytes(self.processes.get, self._devices_of)

    def _devices_of(self, tgid: int, library: int) -> tuple[NetDevice, ...]:
        assert library == 3
        self.asked.append(tgid)
        if tgid not in self.devices:
            raise Refused(f"process {tgid}: its memory cannot be read (no permission): grant railscope CAP_SYS_PTRACE")
        return self.devices[tgid]

    def begin(self, tgid: int, namespace: int | None, *devices: NetDevice) -> None:
        netns = None if namespace is None else NetworkNamespace(namespace, Path("/proc/0/ns/net"), own=False)
        self.processes[tgid] = ObservedProcess(ProcessIdentity(tgid, 1), netns, JobFacts(), "", "2.32.3")
        if devices:
            self.devices[tgid] = devices

    def send(self, tgid: int, network: NetworkKind, device: int, sent_bytes: int) -> None:
        row = self.rows.get((tgid, network, device), Sent(tgid, 3, network, device, 0, 0))
        self.rows[tgid, network, device] = Sent(tgid, 3, network, device, row.messages + 1, row.bytes + sent_bytes)

    def read(self) -> None:
        self.rails.add_readings(self.rows.values())

    def end(self, tgid: int) -> None:
        self.devices.pop(tgid, None)
        self.rails.end_processes({tgid}, self.rows.values())
        self.processes.pop(tgid)
        self.rows = {key: row for key, row in self.rows.items() if key[0] != tgid}


def test_devices_of_one_number_are_told_apart_by_process_network_and_port() -> None:
    node = Node()
    node.begin(10, 1, RAIL0, RAIL1)
    node.begin(11, 2, NetDevice(SOCKET, 0, "rail1", None), ADAPTER)
    node.send(10, SOCKET, 0, 100)
    node.send(10, SOCKET, 1, 20)
    node.send(11, SOCKET, 0, 3)
    node.send(11, IB, 0, 4)
    node.read()
    assert node.rails.totals() == {
        SentRail(1, SOCKET, "rail0", None): HandedOver(100, 1),
        SentRail(1, SOCKET, "rail1", None): HandedOver(20, 1),
        SentRail(2, SOCKET, "rail1", None): HandedOver(3, 1),
        SentRail(2, IB, "mlx5_0", 2): HandedOver(4, 1),
    }
    assert node.rails.by_device() == {
        (1, "rail0"): HandedOver(100, 1),
        (1, "rail1"): HandedOver(20, 1),
        (2, "rail1"): HandedOver(3, 1),
        (2, "mlx5_0"): HandedOver(4, 1),
    }
    assert node.rails.unattributed() == HandedOver(0, 0)


def test_names_are_read_once_for_a_process_however_often_it_sends() -> None:
    node = Node()
    node.begin(10, 1, RAIL0, RAIL1)
    for _ in range(5):
        node.send(10, SOCKET, 0, 1)
        node.send(10, SOCKET, 1, 1)
        node.read()
    node.read()
    assert node.asked == [10]
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(5, 5), (1, "rail1"): HandedOver(5, 5)}


def test_a_device_keeps_its_first_name_when_others_are_asked_for_later() -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    node.send(10, SOCKET, 0, 100)
    node.read()
    node.devices[10] = (NetDevice(SOCKET, 0, "eth9", None), RAIL1)
    for device in (0, 1):
        node.send(10, SOCKET, device, 1)
    node.read()
    assert node.asked == [10, 10]
    node.send(10, SOCKET, 0, 1)
    node.read()
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(102, 3), (1, "rail1"): HandedOver(1, 1)}


@pytest.mark.parametrize(("messages", "sent_bytes"), [(2, 30), (1, 900), (1, 30)])
def test_a_row_that_was_dropped_and_made_again_counts_from_its_beginning(messages: int, sent_bytes: int) -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    for each in (60, 40):
        node.send(10, SOCKET, 0, each)
    node.read()
    node.rows[10, SOCKET, 0] = Sent(10, 3, SOCKET, 0, messages, sent_bytes)
    node.read()
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(100 + sent_bytes, 2 + messages)}


def test_an_ended_process_keeps_its_share_and_the_last_of_what_it_sent() -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    node.send(10, SOCKET, 0, 100)
    node.read()
    node.send(10, SOCKET, 0, 7)
    node.end(10)
    node.read()
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(107, 2)}


def test_a_later_process_with_the_same_pid_adds_all_it_sends_under_its_own_names() -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    node.send(10, SOCKET, 0, 100)
    node.read()
    node.end(10)
    node.begin(10, 2, NetDevice(SOCKET, 0, "eth5", None))
    node.send(10, SOCKET, 0, 150)
    node.read()
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(100, 1), (2, "eth5"): HandedOver(150, 1)}


def test_the_end_of_one_process_leaves_the_others_rows_for_the_next_reading() -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    node.begin(11, 1, RAIL0)
    node.rails.read_device_names(10, 3)
    node.send(10, SOCKET, 0, 1)
    node.send(11, SOCKET, 0, 2)
    node.end(10)
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(1, 1)}
    node.read()
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(3, 2)}


def test_a_short_job_is_named_if_it_was_asked_in_time() -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    node.rails.read_device_names(10, 3)
    node.rails.read_device_names(10, 3)
    node.send(10, SOCKET, 0, 9)
    node.end(10)
    assert node.asked == [10]
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(9, 1)}


def test_what_cannot_be_named_is_counted_and_stays_so_when_the_name_comes() -> None:
    node = Node()
    node.begin(10, 1)
    node.send(10, SOCKET, 0, 50)
    node.read()
    assert node.rails.unattributed() == HandedOver(50, 1)
    node.devices[10] = (RAIL0,)
    node.send(10, SOCKET, 0, 8)
    node.read()
    assert node.rails.totals() == {
        SentRail(1, SOCKET, UNKNOWN, None): HandedOver(50, 1),
        SentRail(1, SOCKET, "rail0", None): HandedOver(8, 1),
    }
    assert node.rails.unattributed() == HandedOver(50, 1)


def test_a_number_without_a_device_and_one_that_the_kernel_could_not_read_are_unknown() -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    node.send(10, SOCKET, 7, 5)
    node.send(10, SOCKET, NO_NET_DEVICE, 6)
    node.read()
    assert node.rails.by_device() == {}
    assert node.rails.unattributed() == HandedOver(11, 2)


def test_a_name_without_a_namespace_is_no_rail_until_the_namespace_is_known() -> None:
    node = Node()
    node.begin(10, None, RAIL0)
    node.send(10, SOCKET, 0, 5)
    node.read()
    assert node.rails.by_device() == {}
    assert node.rails.unattributed() == HandedOver(5, 1)
    node.begin(10, 1, RAIL0)
    node.send(10, SOCKET, 0, 2)
    node.read()
    assert node.rails.by_device() == {(1, "rail0"): HandedOver(2, 1)}


def test_a_process_that_cannot_be_read_is_left_alone_after_a_while_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    node = Node()
    node.begin(10, 1)
    for _ in range(3 * MOST_TRIES):
        node.send(10, SOCKET, 0, 1)
        node.send(10, SOCKET, 1, 1)
        node.read()
    assert node.asked == [10] * MOST_TRIES
    assert [record.getMessage() for record in caplog.records] == [
        "rails of collectives: process 10: its memory cannot be read (no permission): grant railscope CAP_SYS_PTRACE"
    ]
    assert node.rails.unattributed() == HandedOver(6 * MOST_TRIES, 6 * MOST_TRIES)


def test_a_number_that_two_networks_share_names_no_device() -> None:
    node = Node()
    node.begin(10, 1, RAIL0, RAIL1, ADAPTER)
    node.rails.read_device_names(10, 3)
    assert node.rails.names_of(10, [1]) == {"rail1"}
    assert node.rails.names_of(10, [0]) == frozenset()
    assert node.rails.names_of(10, [1, 0]) == frozenset()
    assert node.rails.names_of(10, [1, 2]) == frozenset()


def test_a_namespace_that_has_gone_takes_its_totals_along() -> None:
    node = Node()
    node.begin(10, 1, RAIL0)
    node.begin(11, 2, RAIL0)
    node.send(10, SOCKET, 0, 1)
    node.send(11, SOCKET, 0, 2)
    node.read()
    node.rails.forget_namespaces({1})
    assert node.rails.by_device() == {(2, "rail0"): HandedOver(2, 1)}


STEP = st.one_of(
    st.tuples(st.just("send"), st.integers(10, 12), st.integers(-1, 2), st.integers(0, 1000)),
    st.tuples(st.just("read"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("end"), st.integers(10, 12), st.just(0), st.just(0)),
    st.tuples(st.just("unreadable"), st.integers(10, 12), st.just(0), st.just(0)),
)


@given(st.lists(STEP, max_size=60))
def test_no_total_falls_and_every_byte_is_counted_once(steps: list[tuple[str, int, int, int]]) -> None:
    node = Node()
    sent_bytes = 0
    for tgid in (10, 11, 12):
        node.begin(tgid, tgid % 2, RAIL0, RAIL1)
    before: dict[SentRail, HandedOver] = {}
    for kind, tgid, device, size_bytes in steps:
        match kind:
            case "send":
                node.send(tgid, SOCKET, device, size_bytes)
                sent_bytes += size_bytes
            case "read":
                node.read()
            case "end":
                node.end(tgid)
                node.begin(tgid, tgid % 2, RAIL0, RAIL1)
            case _:
                node.devices.pop(tgid, None)
        now = node.rails.totals()
        assert all(now[rail].bytes >= handed.bytes for rail, handed in before.items())
        before = now
    node.read()
    totals = node.rails.totals()
    assert sum(handed.bytes for handed in totals.values()) == sent_bytes
    named = sum(handed.bytes for handed in node.rails.by_device().values())
    assert named + node.rails.unattributed().bytes == sent_bytes
