"""Queue pairs of RDMA devices and whose they are, from synthesised messages; real ones are in tests/vm."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.facts.hardware import NodeFabric, QueuePairCount
from railscope.agent.node.fabric.queue_pairs import MOST_QUEUE_PAIRS, OTHERS, PERIOD_NS, Kernel, QueuePairs
from railscope.agent.node.inspection.tenants import Tenant
from railscope.exporters.web.pages import render_queue_pairs
from railscope.probes.netdev.netlink import MalformedNetlink
from railscope.probes.rdma.netlink import NLDEV_STAT_GET
from railscope.probes.rdma.queue_pairs import (
    NLDEV_RES_CM_ID_GET,
    NLDEV_RES_QP_GET,
    BoundCounter,
    CmConnection,
    QueuePair,
    QueuePairReading,
    parse_bound_counters,
    parse_connections,
    parse_queue_pairs,
    process_of_thread,
)
from tests.unit.exporters_snapshots import full_snapshot
from tests.unit.netdev_messages import SteppedClock, attribute, message
from tests.unit.test_rdma_netlink import number, text

CONNECTED = QueuePair("mlx5_0", 1, 77, 88, "RC", "RTS", 4242, "")


def entry(pair: QueuePair) -> bytes:
    """As the kernel's fill_res_qp_entry writes one."""
    states = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
    kinds = {"GSI": 1, "RC": 2, "UD": 4, "DRIVER": 255}
    parts = number(3, pair.port) if pair.port is not None else b""
    parts += number(21, pair.number)
    if pair.kind == "RC":
        parts += number(22, pair.remote_number or 0) + number(23, 1)
    parts += number(24, 2) + attribute(26, bytes([kinds[pair.kind]])) + attribute(27, bytes([states.index(pair.state)]))
    if pair.thread is not None:
        parts += number(28, pair.thread)
    if pair.kernel_user:
        parts += text(29, pair.kernel_user)
    return attribute(20, parts)


def table(kind: int, nest: int, *entries: bytes) -> bytes:
    return message(kind, number(1, 0) + text(2, "mlx5_0") + attribute(nest, b"".join(entries)))


def queue_pairs(*pairs: QueuePair) -> list[bytes]:
    return [table(NLDEV_RES_QP_GET, 19, *map(entry, pairs)), message(3, bytes(4))]


pairs = st.builds(
    QueuePair,
    st.just("mlx5_0"),
    st.none() | st.integers(1, 255),
    st.integers(0, 2**24 - 1),
    st.none(),
    st.sampled_from(["GSI", "UD", "DRIVER"]),
    st.sampled_from(["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"]),
    st.none() | st.integers(1, 2**22),
    st.just(""),
)
connected = st.builds(replace, pairs, kind=st.just("RC"), remote_number=st.none() | st.integers(1, 2**24 - 1))


@settings(deadline=None)
@given(st.lists(pairs | connected, max_size=30))
def test_every_queue_pair_comes_back_as_it_is(found: list[QueuePair]) -> None:
    assert parse_queue_pairs(queue_pairs(*found), "mlx5_0", {}) == found


@settings(deadline=None)
@given(st.lists(pairs | connected, min_size=1, max_size=5), st.data())
def test_a_cut_or_wrong_answer_is_refused_or_read_and_never_worse(found: list[QueuePair], data: st.DataObject) -> None:
    whole = bytearray(queue_pairs(*found)[0])
    at = data.draw(st.integers(16, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    for damaged in (bytes(whole), bytes(whole[:at])):
        for parse in (
            lambda one: parse_queue_pairs([one], "mlx5_0", {}),
            lambda one: parse_connections([one]),
            lambda one: parse_bound_counters([one], "mlx5_0"),
        ):
            try:
                parse(damaged)
            except MalformedNetlink:
                continue


def test_the_kernels_own_are_told_by_name() -> None:
    own = QueuePair("mlx5_0", 1, 1, None, "GSI", "RTS", None, "ib_core")
    assert parse_queue_pairs(queue_pairs(own), "mlx5_0", {}) == [own]


def connection(local: int, family: int, address: bytes) -> bytes:
    def end(port: int) -> bytes:
        where = struct.pack("=H", family) + struct.pack("!H", port)
        return (where + (bytes(4) if family == socket.AF_INET6 else b"") + address).ljust(128, b"\0")

    ends = attribute(33, end(20_049)) + attribute(34, end(4791))
    return attribute(31, number(21, local) + number(32, 0x0106) + ends + number(28, 9))


def test_who_was_connected_by_rdma_cm_has_the_address_of_its_other_end() -> None:
    four = connection(77, socket.AF_INET, socket.inet_aton("10.1.2.3"))
    six = connection(78, socket.AF_INET6, socket.inet_pton(socket.AF_INET6, "fd00::7"))
    other = connection(79, 27, bytes(16))
    listening = attribute(31, number(32, 0x0106) + number(28, 9))
    found = parse_connections([table(NLDEV_RES_CM_ID_GET, 30, four, six, other, listening)])
    assert found == {77: CmConnection("10.1.2.3", (20_049, 4791)), 78: CmConnection("fd00::7", (20_049, 4791))}
    assert parse_queue_pairs(queue_pairs(CONNECTED), "mlx5_0", found) == [
        replace(CONNECTED, remote_address="10.1.2.3", services=(20_049, 4791))
    ]


def test_counters_that_somebody_bound_come_with_their_queue_pairs() -> None:
    values = attribute(80, attribute(81, text(82, "rx_write_requests") + attribute(83, struct.pack("=Q", 2**40))))
    of = attribute(19, attribute(20, number(21, 77)) + attribute(20, number(21, 78)))
    bound = attribute(78, number(3, 1) + number(79, 5) + number(74, 1) + of + values)
    assert parse_bound_counters([table(NLDEV_STAT_GET, 77, bound)], "mlx5_0") == [
        BoundCounter("mlx5_0", 1, 5, (77, 78), (("rx_write_requests", 2**40),))
    ]


def test_a_thread_leads_to_its_process() -> None:
    ready, ending = threading.Event(), threading.Event()
    found: list[int] = []

    def work() -> None:
        found.append(threading.get_native_id())
        ready.set()
        ending.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        assert found[0] != os.getpid()
        assert process_of_thread(Path("/proc"), found[0]) == os.getpid()
    finally:
        ending.set()
        thread.join()
    assert process_of_thread(Path("/proc"), 2**22) is None


class SimulatedKernel:
    """Answers with what a test gives it; threads 4242 to 4244 are those of process 4000."""

    def __init__(self, clock: SteppedClock, *answers: QueuePairReading | OSError, takes_ns: int = 0) -> None:
        self._clock = clock
        self._answers = list(answers)
        self._takes_ns = takes_ns
        self.asked = 0

    def read(self) -> QueuePairReading:
        self.asked += 1
        self._clock.now_ns += self._takes_ns
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def watch(self) -> QueuePairs:
        processes = {4242: 4000, 4243: 4000, 4244: 4000}
        return QueuePairs(self._clock, Kernel(self.read, lambda thread: processes.get(thread)))


def test_queue_pairs_are_counted_by_process_device_and_what_became_of_them() -> None:
    clock = SteppedClock()
    found = (
        CONNECTED,
        replace(CONNECTED, number=78, thread=4243, state="RTR"),
        replace(CONNECTED, number=79, thread=4244, state="ERR"),
        replace(CONNECTED, number=80, state="INIT", remote_number=None),
        replace(CONNECTED, number=81, thread=5),
        replace(CONNECTED, number=82, thread=None),
        QueuePair("mlx5_0", 1, 1, None, "GSI", "RTS", None, "ib_core"),
    )
    watch = SimulatedKernel(clock, QueuePairReading(found, ())).watch()
    watch.update()
    assert set(watch.facts.counts) == {
        QueuePairCount("mlx5_0", "4000", "connected", 2),
        QueuePairCount("mlx5_0", "4000", "error", 1),
        QueuePairCount("mlx5_0", "4000", "not_connected", 1),
        QueuePairCount("mlx5_0", "unknown", "connected", 2),
    }
    assert [one.pid for one in watch.facts.queue_pairs] == [4000, 4000, 4000, 4000, None, None, None]


def test_beyond_so_many_processes_those_with_the_fewest_are_told_as_one() -> None:
    clock = SteppedClock()
    many = (*(replace(CONNECTED, number=one, thread=one) for one in range(1, 2001)), replace(CONNECTED, thread=1))
    kernel = Kernel(lambda: QueuePairReading(many, ()), lambda thread: thread)
    watch = QueuePairs(clock, kernel)
    watch.update()
    assert len(watch.facts.counts) == 1025
    assert watch.facts.counts[0] == QueuePairCount("mlx5_0", "1", "connected", 2)
    assert watch.facts.counts[-1] == QueuePairCount("mlx5_0", OTHERS, "connected", 2000 - 1024)


def test_a_user_with_thousands_of_processes_hides_no_process_of_another() -> None:
    many = tuple(replace(CONNECTED, number=one, thread=one // 2) for one in range(2, 6002))
    mine = replace(CONNECTED, number=1, thread=9000)
    users = {9000: Tenant(1000)}
    kernel = Kernel(
        lambda: QueuePairReading((*many, mine), ()), lambda thread: thread, lambda pid: users.get(pid, Tenant(5000))
    )
    watch = QueuePairs(SteppedClock(), kernel)
    watch.update()
    assert QueuePairCount("mlx5_0", "9000", "connected", 1) in watch.facts.counts
    assert len(watch.facts.counts) == 1025
    assert sum(one.count for one in watch.facts.counts) == 6001


def test_a_user_with_more_queue_pairs_than_are_told_of_hides_none_of_another() -> None:
    many = tuple(replace(CONNECTED, number=one, thread=5000 + one % 7) for one in range(MOST_QUEUE_PAIRS + 100))
    mine = tuple(replace(CONNECTED, device="mlx5_1", number=one, thread=9000) for one in range(50))
    kernel = Kernel(
        lambda: QueuePairReading((*many, *mine), ()),
        lambda thread: thread,
        lambda pid: Tenant(1000 if pid == 9000 else 5000),
    )
    watch = QueuePairs(SteppedClock(), kernel)
    watch.update()
    assert len(watch.facts.queue_pairs) == MOST_QUEUE_PAIRS
    assert watch.facts.left_out == 150
    assert QueuePairCount("mlx5_1", "9000", "connected", 50) in watch.facts.counts


def test_queue_pairs_are_read_seldom_and_less_often_where_a_device_is_slow() -> None:
    clock = SteppedClock()
    kernel = SimulatedKernel(clock, QueuePairReading((CONNECTED,), ()), takes_ns=1_000_000_000)
    watch = kernel.watch()
    watch.update()
    for seconds, asked in ((31, 1), (60, 1), (10, 2)):
        clock.now_ns += seconds * 1_000_000_000
        watch.update()
        assert kernel.asked == asked


def test_a_refusal_is_a_failure_that_leaves_what_was_known_and_no_rdma_is_none() -> None:
    clock = SteppedClock()
    reading = QueuePairReading((CONNECTED,), ())
    watch = SimulatedKernel(clock, reading, OSError(errno.EIO, "I/O error")).watch()
    watch.update()
    clock.now_ns += PERIOD_NS
    watch.update()
    assert watch.result is not None
    assert not watch.result.success
    assert len(watch.facts.queue_pairs) == 1
    none = SimulatedKernel(clock, OSError(errno.EPROTONOSUPPORT, "no such protocol")).watch()
    none.update()
    assert none.result is None


def test_the_page_tells_each_with_its_other_end_and_what_was_bound() -> None:
    page = json.loads(render_queue_pairs(full_snapshot()))
    assert page["queue_pairs"] == [
        {
            "device": "mlx5_0",
            "port": 1,
            "number": 77,
            "remote_number": 88,
            "remote_address": "10.1.2.3",
            "type": "RC",
            "state": "RTS",
            "pid": 4711,
            "kernel_user": None,
            "owners": ["nccl", "nixl"],
        }
    ]
    assert page["counters"] == [
        {"device": "mlx5_0", "port": 1, "number": 5, "queue_pairs": [77], "values": {"rx_write_requests": 12}}
    ]
    assert page["read_realtime_ns"] == full_snapshot().realtime_ns - full_snapshot().monotonic_ns + 5_000_000_000
    assert json.loads(render_queue_pairs(replace(full_snapshot(), fabric=NodeFabric())))["read_realtime_ns"] is None
