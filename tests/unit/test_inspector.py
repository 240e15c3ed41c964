"""A closer look at suspects: what moved between two readings, of whom.  /proc, connections and rails are simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls import inspector as close_look
from railscope.agent.node.stalls.inspector import MOST_FRESH, MOST_LOOKS, MOST_THREADS_READ, READ_PERIOD_NS, Inspector
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.clock import Clock
from railscope.probes.netdev.connection_state import ConnectionState
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.processes import ProcessIdentity
from railscope.probes.processes.state import ThreadTimes, thread_times
from railscope.probes.processes.tree import ProcessTrees
from tests.unit.exporters_snapshots import rail
from tests.unit.stall_world import SimulatedClock
from tests.unit.test_connection_state import QUIET

NETNS = NetworkNamespace(77, Path("/proc/5/ns/net"), own=True)
ETHERNET = replace(
    rail("0", "rail0"),
    port="",
    link_layer="Ethernet",
    counters=(("rx_crc_errors", "warn", 5), ("carrier_changes", "warn", 2), ("packets", "info", 7)),
)


class World:
    """One namespace with one rail, and what processes hold there."""

    def __init__(self, procfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = SimulatedClock()
        self.procfs = procfs
        self.connections: list[ConnectionState] = []
        self.rails = [ETHERNET]
        self.opened = self.closed = self.asked = 0
        self.sent_to_services: Counter[int] = Counter()
        self.parents: dict[int, int] = {}
        self.refuses = False
        world = self

        class Connections:
            def __init__(self, _clock: Clock, _procfs: Path) -> None:
                world.opened += 1
                self.sent_to_services = world.sent_to_services

            def read(self, pids: Collection[int], parents: Mapping[int, int]) -> tuple[ConnectionState, ...]:
                world.asked += 1
                world.parents = dict(parents)
                if world.refuses:
                    raise PermissionError(1, "simulated refusal")
                return tuple(one for one in world.connections if one.pid in pids)

            def close(self) -> None:
                world.closed += 1

        monkeypatch.setattr(close_look, "ProcessConnections", Connections)
        self.look = Inspector(self.clock, procfs, self._rails)

    def _rails(self, netns: int) -> Iterable[tuple[RailFacts, int | None]]:
        assert netns == NETNS.inode
        return [(one, None) for one in self.rails]

    def process(self, pid: int = 5, *, busy_ns: int = 0, waited_ns: int = 0, runs: int = 0) -> ObservedProcess:
        """A process with one thread, as /proc has it now."""
        task = self.procfs / str(pid) / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        fields = ["S", *("0" for _ in range(16)), "1", "0", "300", *("0" for _ in range(32))]
        (self.procfs / str(pid) / "stat").write_text(f"{pid} (rank) {' '.join(fields)}\n")
        (task / "schedstat").write_text(f"{busy_ns} {waited_ns} {runs}\n")
        return ObservedProcess(ProcessIdentity(pid, 300), NETNS, JobFacts(), "", "2.27.3")

    def wait(self, seconds: float = 0.5) -> None:
        self.clock.sleep(seconds)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def connection(cookie: int, moved: int, pid: int = 5, **more: object) -> ConnectionState:
    values = {"bytes_acked": moved, "bytes_received": 0, "bytes_sent": moved, **more}
    return replace(QUIET, cookie=cookie, pid=pid, device="rail0", **values)  # type: ignore[arg-type]


def test_ratios_are_what_happened_between_two_readings(world: World) -> None:
    world.look.process(world.process(busy_ns=10**9))
    world.wait()
    facts = world.look.process(world.process(busy_ns=10**9 + 250_000_000, waited_ns=500_000_000))
    assert (facts.window_ns, facts.busy_ratio, facts.waited_ratio) == (500_000_000, 0.5, 1.0)
    assert facts.condition == "running"


def test_a_process_is_not_read_again_at_once(world: World) -> None:
    first = world.look.process(world.process(busy_ns=0))
    world.clock.now_ns += READ_PERIOD_NS - 1
    assert world.look.process(world.process(busy_ns=10**9)) == first


def test_a_process_to_which_something_happened_is_read_again_at_once_and_once(world: World) -> None:
    world.connections = [connection(1, 0)]
    process = world.process()
    world.look.process(process)
    asked = world.asked
    world.clock.now_ns += 1000
    stat = world.procfs / "5" / "stat"
    stat.write_text(stat.read_text().replace(") S", ") T"))
    assert world.look.process(process).condition == "running"
    world.look.outdate(process)
    assert [world.look.process(process).condition for _ in range(3)] == ["stopped"] * 3
    assert world.asked == asked + 1


def test_what_was_long_ago_is_not_part_of_the_last_moments(world: World) -> None:
    world.connections = [connection(1, 0)]
    for moved in (10**9, 2 * 10**9):
        world.look.process(world.process())
        world.connections = [connection(1, moved)]
        world.wait(5)
    facts = world.look.process(world.process())
    assert (facts.window_ns, facts.moved_bytes) == (0, 0)
    world.wait()
    assert world.look.process(world.process()).window_ns == 500_000_000


def test_bytes_of_a_process_are_those_of_its_connections_since_each_was_first_seen(world: World) -> None:
    world.connections = [connection(1, 100), connection(3, 5000, pid=6)]
    world.look.process(world.process(5))
    world.wait()
    world.connections = [connection(1, 150), connection(2, 1000), connection(3, 5000, pid=6)]
    world.look.process(world.process(5))
    # Another process comes under suspicion later: its bytes count from then on.
    world.look.process(world.process(6))
    world.wait()
    world.connections = [connection(1, 150), connection(2, 1700), connection(3, 5600, pid=6)]
    assert world.look.process(world.process(5)).moved_bytes == 50 + 700
    assert world.look.process(world.process(6)).moved_bytes == 600


def test_a_process_without_connections_moves_nobody_knows_what(world: World) -> None:
    assert world.look.process(world.process()).moved_bytes is None


def test_a_rail_s_signs_are_those_of_the_suspect_s_connections_and_of_the_device(world: World) -> None:
    world.connections = [connection(1, 1000), connection(9, 1, pid=6)]
    world.look.rails(world.process(), frozenset())
    world.wait()
    world.connections = [
        connection(
            1,
            6000,
            busy_us=250_000,
            round_trip_us=3000,
            round_trip_deviation_us=400,
            retransmitted_bytes=500,
            unread_bytes=7,
        ),
        connection(
            2, 0, unacknowledged_segments=9, unanswered_retransmissions=3, last_acknowledged_ms=1500, peer_closed=True
        ),
        connection(9, 10**9, pid=6),
    ]
    more = (("rx_crc_errors", "warn", 25), ("carrier_changes", "warn", 9), ("packets", "info", 700))
    transmitted = (ETHERNET.transmit_bytes or 0) + 4096
    world.rails = [replace(ETHERNET, counters=more, transmit_bytes=transmitted)]
    (signs,) = world.look.rails(world.process(), frozenset())
    assert (signs.device, signs.connections, signs.unanswered, signs.peer_closed) == ("rail0", 2, 1, 1)
    assert (signs.unanswered_ns, signs.sent_bytes, signs.retransmitted_bytes) == (1_500_000_000, 5000, 500)
    assert (signs.unread_bytes, signs.port_bytes, signs.losses) == (7, 4096, (("rx_crc_errors", 20),))
    assert signs.busy_ratio == pytest.approx(0.25), "half of the window, on one of two that send"
    assert signs.round_trip_ns == (3000 + 100) * 1000 // 2
    assert signs.round_trip_deviation_ns == (400 + 20) * 1000 // 2
    assert signs.surely_used


@pytest.mark.parametrize(
    ("transmitted", "received", "ratio"),
    [(2000, 1000, 0.0), (10_000, 1000, 0.8), (2000, 11_000, 10 / 11), (2000, 1100, 0.05), (0, 0, 0.0)],
    ids=["its own", "others send", "others receive", "acknowledgements", "idle"],
)
def test_what_a_rail_carries_for_others_is_held_against_its_busier_direction(
    world: World, transmitted: int, received: int, ratio: float
) -> None:
    suspects = [world.process(5), world.process(6)]
    for moved in (0, 1000):
        world.connections = [
            connection(1, moved, bytes_received=moved // 2),
            connection(2, moved, pid=6, bytes_received=moved // 2),
        ]
        for process in suspects:
            world.look.rails(process, frozenset())
        world.wait()
        world.rails = [
            replace(
                ETHERNET,
                transmit_bytes=(ETHERNET.transmit_bytes or 0) + transmitted,
                receive_bytes=(ETHERNET.receive_bytes or 0) + received,
            )
        ]
    (signs,) = world.look.rails(suspects[0], frozenset())
    assert signs.foreign_ratio == pytest.approx(ratio)


def test_a_rail_that_a_process_does_not_use_is_not_shown(world: World) -> None:
    assert world.look.rails(world.process(), frozenset()) == ()
    infiniband = replace(ETHERNET, device="mlx5_0", port="1", link_layer="InfiniBand")
    never_used = replace(infiniband, device="mlx5_1", transmit_bytes=0)
    converged = replace(ETHERNET, device="bnxt_re0", port="1")
    adapter = replace(ETHERNET, device="rdmap0s6", port="1", link_layer="unknown")
    world.rails = [ETHERNET, infiniband, never_used, converged, adapter]
    world.wait()
    perhaps = world.look.rails(world.process(), frozenset())
    assert [(one.device, one.surely_used) for one in perhaps] == [
        ("mlx5_0", False),
        ("bnxt_re0", False),
        ("rdmap0s6", False),
    ]
    shown = world.look.rails(world.process(), frozenset({"mlx5_1"}))
    assert [(one.device, one.surely_used) for one in shown] == [("mlx5_1", True)]


def test_either_port_of_a_device_may_be_the_one_that_is_used(world: World) -> None:
    first = replace(ETHERNET, device="mlx4_0", port="1", link_layer="InfiniBand")
    world.rails = [first, replace(first, port="2", up=False)]
    shown = world.look.rails(world.process(), frozenset({"mlx4_0"}))
    assert [(one.up, one.surely_used) for one in shown] == [(first.up, False), (False, False)]


def test_readings_are_looked_through_once_however_often_somebody_asks(world: World) -> None:
    world.connections = [connection(1, 1000)]
    process = world.process()
    signs = world.look.rails(process, frozenset())
    assert world.look.rails(process, frozenset()) is signs
    world.wait()
    world.connections = [connection(1, 5000)]
    assert world.look.rails(process, frozenset())[0].sent_bytes == 4000


def test_a_process_in_an_unknown_namespace_has_no_rails(world: World) -> None:
    nowhere = replace(world.process(), namespace=None)
    assert world.look.rails(nowhere, frozenset()) == ()
    assert world.look.process(nowhere).moved_bytes is None


def test_a_refusal_costs_the_connections_and_nothing_else(world: World) -> None:
    world.refuses = True
    assert world.look.process(world.process()).condition == "running"
    assert (world.opened, world.closed) == (1, 1)
    world.refuses = False
    world.wait()
    world.connections = [connection(1, 5)]
    world.look.process(world.process())
    assert world.opened == 2
    assert len(world.look.rails(world.process(), frozenset())) == 1


def test_a_process_that_may_not_be_looked_at_is_taken_for_running_and_stops_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(close_look, "process_state", refuse)
    assert world.look.process(world.process()).condition == "running"
    world.look.remember_threads(world.process())
    world.wait(60)
    world.look.close_unused()


def test_connections_are_asked_about_once_for_all_suspects(world: World) -> None:
    for _ in range(3):
        world.look.process(world.process(5))
        world.look.rails(world.process(5), frozenset())
    assert world.asked == 1


def test_of_thousands_of_new_suspects_a_few_are_read_out_of_turn_and_the_others_with_the_next(world: World) -> None:
    pids = range(5, 105)
    world.connections = [connection(pid, 100, pid=pid) for pid in pids]
    for pid in pids:
        world.look.process(world.process(pid))
    assert world.asked == 1 + MOST_FRESH
    for seconds in (0.5, 0.5):
        world.wait(seconds)
        world.connections = [replace(one, bytes_acked=one.bytes_acked + 10) for one in world.connections]
        moved = [world.look.process(world.process(pid)).moved_bytes for pid in pids]
    assert world.asked == 3 + MOST_FRESH
    assert all(one in (10, 20) for one in moved)


def test_one_tenants_suspects_take_no_look_for_descendants_from_anothers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def totals(_trees: ProcessTrees, pid: int, *, look: bool) -> None:
        looks.extend([pid] * look)

    monkeypatch.setattr(ProcessTrees, "totals", totals)
    for _ in range(3):
        looks.clear()
        for pid in range(5, 5 + 2 * MOST_LOOKS):
            world.look.process(replace(world.process(pid), tenant=Tenant(1000)))
        world.look.process(replace(world.process(4), tenant=Tenant(1001)))
        assert len(looks) == MOST_LOOKS + 1
        assert looks[-1] == 4
        world.wait(1)


def test_what_nobody_asks_about_is_let_go(world: World) -> None:
    world.look.process(world.process())
    world.wait(5)
    world.look.close_unused()
    assert world.closed == 0
    world.wait(6)
    world.look.close_unused()
    assert world.closed == 1
    world.look.process(world.process())
    world.look.close()
    assert (world.opened, world.closed) == (2, 2)


def test_a_tenant_with_many_threads_has_so_many_read_and_another_tenants_are_read_beside_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def times(_procfs: Path, pid: int) -> tuple[ThreadTimes, ...]:
        read.append(pid)
        return tuple(ThreadTimes(tid, 0, 0, len(read)) for tid in range(1024))

    monkeypatch.setattr(close_look, "thread_times", times)
    greedy, modest = Tenant(5000, ""), Tenant(5001, "")
    processes = [replace(world.process(pid), tenant=greedy if pid < 200 else modest) for pid in range(100, 201)]
    for _ in range(2):
        for process in processes:
            world.look.remember_threads(process)
        assert read == [*range(100, 100 + MOST_THREADS_READ // 1024), 200]
        read.clear()
        world.wait(5)  # who has so many is not read again before


def test_threads_of_a_process_with_very_many_are_read_more_seldom(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = world.process()
    for tid in range(6, 500):
        task = world.procfs / "5" / "task" / str(tid)
        task.mkdir()
        (task / "schedstat").write_text("0 0 0\n")
    read: list[float] = []

    def times(procfs: Path, pid: int) -> tuple[ThreadTimes, ...]:
        read.append(world.clock.now_ns / 1e9)
        return thread_times(procfs, pid)

    monkeypatch.setattr(close_look, "thread_times", times)
    began = world.clock.now_ns / 1e9
    windows = set()
    for _ in range(17):
        world.look.remember_threads(process)
        windows.add(world.look.process(process).window_ns)
        world.wait(0.25)
    assert [at - began for at in read] == [0.0, 2.0, 4.0]
    assert windows == {0, 1_000_000_000, 2_000_000_000}


def test_a_process_with_very_many_threads_is_judged_by_two_readings_where_looks_are_rare(world: World) -> None:
    process = world.process()
    for tid in range(6, 518):
        task = world.procfs / "5" / "task" / str(tid)
        task.mkdir()
        (task / "schedstat").write_text("0 0 0\n")
    windows = []
    for _ in range(12):
        windows.append(world.look.process(process).window_ns)
        world.wait(1.0)
    # The times of 512 threads stand for a second, and what is not read at one look is two seconds old at the next.
    assert windows == [0, 0, *[2_000_000_000] * 10]


def test_threads_that_ran_while_calls_were_made_take_part(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[int]] = []

    def waiting(_procfs: Path, _pid: int, tids: frozenset[int], _machine: str) -> dict[int, str]:
        asked.append(tids)
        return dict.fromkeys(tids, "recvmsg")

    monkeypatch.setattr(close_look, "threads_waiting_for_network", waiting)
    monkeypatch.setattr(close_look, "platform", SimpleNamespace(machine=lambda: "x86_64"))
    world.look.remember_threads(world.process(runs=5))
    assert world.look.waits_for_network(world.process()) == ()
    world.wait()
    world.look.remember_threads(world.process(runs=5))
    world.wait()
    assert world.look.waits_for_network(world.process()) == ()
    world.look.remember_threads(world.process(runs=9))
    # Another communicator of the same process asks at once.
    world.look.remember_threads(world.process(runs=9))
    world.wait()
    assert world.look.waits_for_network(world.process()) == ("recvmsg",)
    world.look.forget(5)
    world.wait()
    assert world.look.waits_for_network(world.process()) == ()
    assert asked == [frozenset(), frozenset(), frozenset({5}), frozenset()]


def test_connections_that_may_not_be_seen_are_said_to_be_hidden_until_they_can_be_seen(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    process, world.refuses = world.process(), True
    for _ in range(3):
        world.look.rails(process, frozenset({"rail0"}))
        world.wait()
    assert world.look.why_hidden(process) == "simulated refusal"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["connections of network namespace 77 cannot be read: simulated refusal"]
    world.refuses = False
    world.look.rails(process, frozenset({"rail0"}))
    assert world.look.why_hidden(process) == ""


def test_connections_of_a_process_in_an_unknown_namespace_are_hidden(world: World) -> None:
    assert "unknown" in world.look.why_hidden(replace(world.process(), namespace=None))


def test_what_descendants_write_and_what_goes_to_services_counts_for_a_process(world: World) -> None:
    def writes(pid: int, size: int, *, children: str = "") -> ObservedProcess:
        process = world.process(pid)
        (world.procfs / str(pid) / "io").write_text(f"wchar: {size}\nwrite_bytes: 0\n")
        (world.procfs / str(pid) / "task" / str(pid) / "children").write_text(children)
        (world.procfs / str(pid) / "schedstat").write_text(f"{size} 0 1\n")
        return process

    rank = writes(5, 1000, children="6 ")
    writes(6, 7000)
    assert world.look.process(rank).written_bytes == 0
    world.wait(1)
    writes(6, 9000, children="7")
    writes(7, 400)
    world.sent_to_services[5] = 30
    facts = world.look.process(rank)
    assert facts.written_bytes == 2400 + 30
    assert facts.descendants_busy_ratio == 2400 / 1_000_000_000
    world.wait()
    world.look.process(rank)
    assert world.parents == {6: 5, 7: 5}, "who is forked holds its parent's sockets"
    assert world.look.written_bytes(rank, closely=False) == 1000 + 2400 + 30
