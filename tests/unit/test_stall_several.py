"""Processes with several communicators each: what one process shows is blamed on the right one, or on none.

Simulated: see stall_world and stall_facts.  Four ranks train a GPT, two a stage: tensor ranks share a stage, both
stages talk to each other, and sum the gradients of their embedding once in a while.  Only calls are seen, unless a test
says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import Stall
from railscope.agent.node.stalls.dependencies import Dependencies, Ranks
from railscope.agent.node.stalls.evidence import Elsewhere, ProcessFacts, RankFacts
from railscope.probes.nccl.abi import Op
from tests.unit import stall_facts
from tests.unit.stall_world import AFTER_S, FLOOR_S, LOOK_S, MOVING, RAILS, STANDING, STOPPED, Rank, World

Place = tuple[str, int]
TENSORS = {"T0": (0, 1), "T1": (2, 3)}
STAGES = {"S0": (0, 2), "S1": (1, 3)}
ENDS = {"E0": (0, 2), "E1": (1, 3)}
HASHES = {name: 0xC0 + number for number, name in enumerate((*TENSORS, *STAGES, *ENDS, "WORLD"))}
UNREAD = tuple(replace(rail, unread_bytes=65_552) for rail in RAILS)
CLOSED = tuple(replace(rail, peer_closed=2) for rail in RAILS)
WAITS = ("recvmsg",)


class Gpt:
    """The job as the agent of a host with some of its processes sees it, in the middle of its work."""

    def __init__(self, processes: Iterable[int] = range(4), *, seen: bool = False) -> None:
        self.world = World(seen=seen, ranks=0)
        self.ends: dict[Place, Rank] = {}
        """By communicator and process."""
        for name, members in (TENSORS | STAGES | ENDS).items():
            for number, process in enumerate(members):
                if process in processes:
                    instance = 100 + len(self.ends)
                    end = Rank(self.world, instance, number, 4711 + process, comm_hash=HASHES[name])
                    end.op = Op.Send if name in STAGES else None
                    self.ends[name, process] = end
        self.world.ranks = list(self.ends.values())
        self.show(MOVING)
        self.world.train(20)
        self.show(STANDING)
        for names in (ENDS, STAGES, TENSORS):
            self.call(*(place for place in self.ends if place[0] in names))

    def show(self, process: ProcessFacts, *processes: int) -> None:
        """What these processes do, or all of them."""
        for (_, number), end in self.ends.items():
            if not processes or number in processes:
                end.process = process

    def connections(self, process: int, rails: tuple[object, ...] = RAILS, waits_in: tuple[str, ...] = ()) -> None:
        """How one process's connections are, and what its threads wait in."""
        for (_, number), end in self.ends.items():
            if number == process:
                end.rails, end.waits_in = rails, waits_in  # type: ignore[assignment]

    def call(self, *places: Place, op: Op | None = None) -> None:
        """One more call of each, a few milliseconds after the ones before."""
        self.world.clock.now_ns += 3_000_000
        for place in places:
            if place in self.ends:
                end = self.ends[place]
                end.sequence += 1
                end.last_ns = self.world.clock.now_ns
                end.op = op if op is not None else end.op
        self.world.tell_calls()

    def stalls(self, seconds: float) -> dict[Place, Stall]:
        """Who stalls after so long."""
        self.world.step(int(seconds / LOOK_S))
        places = {end.instance: place for place, end in self.ends.items()}
        return {places[stall.instance]: stall for stall in self.world.watch.current}


def stopped_in_t1(processes: Iterable[int] = range(4), *, entered: bool = True) -> Gpt:
    """Process 3 is stopped within an AllReduce of its stage, or before it entered it; the others wait as they must."""
    job = Gpt(processes)
    job.call(("T1", 2), *([("T1", 3)] if entered else []))
    job.call(("S0", 0), ("S1", 1), op=Op.Recv)
    job.show(STOPPED, 3)
    job.connections(2, UNREAD, WAITS)  # what process 0 has sent already for the next step
    for waits in (0, 1):
        job.connections(waits, waits_in=WAITS)
    return job


@pytest.mark.parametrize("entered", [True, False], ids=["within", "before"])
def test_the_stopped_rank_is_named_wherever_somebody_waits_for_it_and_nobody_else_is(entered: bool) -> None:
    job = stopped_in_t1(entered=entered)
    early = job.stalls(FLOOR_S + 1)
    assert {place for place, stall in early.items() if stall.diagnosis.cause is Cause.PROCESS_STOPPED} == {
        ("T1", 3),
        ("S1", 3),
    }
    late = job.stalls(AFTER_S)
    assert late.keys() == {("T1", 2), ("T1", 3), ("S1", 1), ("S1", 3), ("S0", 0)}
    assert {late[place].diagnosis.blamed_rank for place in late if place != ("S0", 0)} == {1}
    waits = late["S0", 0].diagnosis
    assert (waits.cause, waits.blamed_rank, waits.culprit) == (Cause.RANK_BEHIND, None, False)
    assert waits.evidence[-1] == (
        f"rank 1 of this host is itself stalled in communicator {HASHES['T1']:016x}: process 4714 of its rank 1 is "
        "stopped"
    )
    assert {place: stall.op for place, stall in late.items()} == {
        ("T1", 2): "AllReduce",
        ("T1", 3): "AllReduce",
        ("S1", 1): "Recv",
        ("S1", 3): "unknown",
        ("S0", 0): "Recv",
    }


def test_a_job_that_computes_between_its_calls_is_silent_whatever_was_called_last() -> None:
    job = Gpt()
    assert job.stalls(300) == {}
    job.call(("S0", 0), ("S0", 2))
    job.show(MOVING)
    assert job.stalls(60) == {}


def test_on_its_own_host_the_stopped_rank_is_named_where_its_peer_waits_and_nowhere_else() -> None:
    job = stopped_in_t1((2, 3))
    stalls = job.stalls(AFTER_S + 5)
    assert stalls.keys() == {("T1", 2), ("T1", 3)}
    assert stalls["T1", 3].diagnosis.cause is Cause.PROCESS_STOPPED
    assert stalls["T1", 2].diagnosis.blamed_rank == 1


def test_on_the_other_host_ranks_wait_and_name_nobody_because_their_peers_may_wait_too() -> None:
    stalls = stopped_in_t1((0, 1)).stalls(AFTER_S + 5)
    assert stalls.keys() == {("S0", 0), ("S1", 1)}
    assert {
        (stall.diagnosis.cause, stall.diagnosis.blamed_rank, stall.diagnosis.culprit) for stall in stalls.values()
    } == {(Cause.RANK_BEHIND, None, False)}


def test_of_a_stopped_process_for_which_nobody_is_seen_to_wait_the_last_call_counts_and_that_is_said() -> None:
    job = Gpt((3,))
    job.show(STOPPED, 3)
    stalls = job.stalls(FLOOR_S + 1)
    assert stalls.keys() == {("T1", 3)}
    diagnosis, op = stalls["T1", 3].diagnosis, stalls["T1", 3].op
    assert (diagnosis.cause, diagnosis.blamed_rank, op) == (Cause.PROCESS_STOPPED, 1, "unknown")
    assert diagnosis.evidence[-1] == "which of its 3 communicators waits for it is unknown"


def test_what_all_ranks_have_left_behind_them_is_not_what_a_stopped_process_is_in() -> None:
    """The last call of process 3 was one that its peer made too, and went on to others from."""
    job = Gpt()
    job.call(("E1", 1), ("E1", 3))
    job.call(("T0", 0), ("T0", 1))
    job.show(STOPPED, 3)
    assert {place for place, stall in job.stalls(FLOOR_S + 1).items() if place[1] == 3} == {("T1", 3)}


def test_with_completion_seen_only_the_operation_in_flight_stalls_with_its_process() -> None:
    job = Gpt((2, 3), seen=True)
    for process in (2, 3):
        job.ends["T1", process].begin()
    job.show(STOPPED, 3)
    stalls = job.stalls(AFTER_S + 5)
    assert stalls.keys() == {("T1", 2), ("T1", 3)}
    assert (stalls["T1", 3].strength, stalls["T1", 3].diagnosis.cause) == ("strong", Cause.PROCESS_STOPPED)


def test_a_rank_is_not_behind_because_it_waits_in_another_communicator() -> None:
    """Process 2 waits for one that is stopped, and so does not come to the sum that process 0 waits in."""
    job = stopped_in_t1()
    job.call(("E0", 0))
    stalls = job.stalls(AFTER_S + 5)
    assert ("E0", 2) not in stalls
    diagnosis = stalls["E0", 0].diagnosis
    assert (diagnosis.cause, diagnosis.blamed_rank, diagnosis.culprit) == (Cause.RANK_BEHIND, None, False)
    assert "is itself stalled in" in diagnosis.evidence[-1]


def test_a_rank_that_skipped_a_collective_is_named_in_that_communicator_only() -> None:
    job = Gpt()
    job.call(("T1", 2))
    job.call(("S0", 0), ("S1", 1), op=Op.Recv)
    for process in (0, 1, 2):
        job.connections(process, waits_in=WAITS)
    job.connections(3, UNREAD)
    early = job.stalls(FLOOR_S + 1)
    assert {place: stall.diagnosis.blamed_rank for place, stall in early.items()} == {("T1", 2): 1, ("T1", 3): 1}
    late = job.stalls(AFTER_S)
    assert late.keys() == {("T1", 2), ("T1", 3), ("S0", 0), ("S1", 1)}
    assert late["S0", 0].diagnosis.blamed_rank is None
    assert late["S1", 1].diagnosis.blamed_rank is None


def test_a_rank_that_skipped_a_collective_is_named_too_where_calls_cannot_be_compared() -> None:
    """An agent that came late: process 3 does not read, and its stage waits for nobody else."""
    job = Gpt()
    job.world.whole = False
    job.call(("T1", 2))
    job.call(("S0", 0), op=Op.Recv)
    for process in (0, 2):
        job.connections(process, waits_in=WAITS)
    job.connections(3, UNREAD)
    stalls = job.stalls(FLOOR_S + 1)
    assert {place: stall.diagnosis.blamed_rank for place, stall in stalls.items()} == {("T1", 2): 1, ("T1", 3): 1}
    assert {(stall.diagnosis.cause, stall.op) for stall in stalls.values()} == {(Cause.RANK_BEHIND, "AllReduce")}
    late = job.stalls(AFTER_S)
    assert late.keys() == {("T1", 2), ("T1", 3), ("S0", 0)}
    assert late["S0", 0].diagnosis.blamed_rank is None


def test_who_is_missing_in_one_communicator_is_not_held_up_there() -> None:
    """Two others wait for it in another one, too: nothing but itself keeps it from coming."""
    job = Gpt()
    job.world.whole = False
    for process in (0, 1, 3):
        end = Rank(job.world, 90 + process, process, 4711 + process, comm_hash=HASHES["WORLD"])
        job.ends["WORLD", process] = end
        job.world.ranks.append(end)
    job.call(("T1", 2))
    job.call(("WORLD", 0), ("WORLD", 1))
    for process in (0, 1, 2):
        job.connections(process, waits_in=WAITS)
    job.connections(3, UNREAD)
    stalls = job.stalls(AFTER_S + 5)
    assert stalls.keys() == {("T1", 2), ("T1", 3), ("WORLD", 0), ("WORLD", 1)}
    assert stalls["T1", 2].diagnosis.blamed_rank == 1
    assert not any("held up" in sentence for sentence in stalls["WORLD", 0].diagnosis.evidence)


def test_a_process_that_does_not_read_is_behind_somewhere_and_where_is_not_guessed() -> None:
    job = Gpt((3,))
    job.connections(3, UNREAD)
    assert job.stalls(AFTER_S - 2) == {}
    stalls = job.stalls(4)
    assert stalls.keys() == {("T1", 3)}
    stall = stalls["T1", 3]
    assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank, stall.strength) == (Cause.UNKNOWN, None, "weak")
    assert "3 communicators" in stall.diagnosis.evidence[0]
    assert stall.op == "unknown"


def test_of_a_killed_rank_survivors_name_it_and_those_whom_they_hold_up_name_nobody() -> None:
    job = Gpt()
    world = Rank(job.world, 99, 3, 4714, comm_hash=HASHES["WORLD"])
    job.ends["WORLD", 3] = world
    job.world.ranks.append(world)
    job.call(("T1", 2), ("T1", 3))
    job.call(("S0", 0), ("S1", 1), op=Op.Recv)
    job.world.step()
    for (_, process), end in job.ends.items():
        end.gone = process == 3
    job.world.watch.processes_gone({4714: 9})
    job.connections(0, CLOSED, WAITS)  # of the communicator of all, which is never called
    job.connections(1, CLOSED, WAITS)
    job.connections(2, UNREAD)  # its call has failed
    stalls = job.stalls(FLOOR_S + 1)
    gone = {place: stall.diagnosis.blamed_rank for place, stall in stalls.items()}
    assert gone == {("T1", 3): 1, ("S1", 3): 1, ("E1", 3): 1, ("T1", 2): 1, ("S1", 1): 1}
    assert {stall.diagnosis.cause for stall in stalls.values()} == {Cause.PROCESS_GONE}
    waits = job.stalls(AFTER_S)["S0", 0].diagnosis
    assert (waits.cause, waits.blamed_rank) == (Cause.RANK_BEHIND, None)
    assert "process 4714 of rank 1 has ended" in waits.evidence[-1]


def test_whose_connections_were_closed_is_not_behind_in_another_communicator() -> None:
    """As the other host sees it: a call of process 1 failed, and it does not come to its stage's next AllReduce."""
    job = Gpt((0, 1))
    job.call(("S1", 1))
    job.call(("T0", 0))
    job.connections(0, waits_in=WAITS)
    job.connections(1, CLOSED)
    stalls = job.stalls(AFTER_S + 5)
    assert stalls.keys() == {("T0", 0)}
    diagnosis = stalls["T0", 0].diagnosis
    assert (diagnosis.cause, diagnosis.blamed_rank, diagnosis.culprit) == (Cause.RANK_BEHIND, None, False)
    assert "connections of its process were closed at their other end" in diagnosis.evidence[-1]


def test_closed_connections_name_no_rank_where_they_may_be_another_communicator_s() -> None:
    job = Gpt((0,))
    job.call(("S0", 0))
    job.connections(0, CLOSED, WAITS)
    assert job.stalls(FLOOR_S + 1) == {}, "somebody may have destroyed another one, and all is well"
    stalls = job.stalls(AFTER_S)
    assert stalls.keys() == {("S0", 0)}
    diagnosis = stalls["S0", 0].diagnosis
    assert (diagnosis.cause, diagnosis.culprit, diagnosis.blamed_rank) == (Cause.RANK_BEHIND, False, None)
    assert "or has destroyed a communicator" in diagnosis.evidence[-1]


# Ways that cross


PROCESSES = 8


class Crossed:
    """Eight communicators of the same eight processes, and each process in the operation of another one."""

    def __init__(self, stopped: int | None = None) -> None:
        self.looked_at: Counter[int] = Counter()
        self.stopped = stopped
        self.ranks = [
            RankFacts(
                instance=PROCESSES * comm + process,
                comm=f"{comm:016x}",
                rank=process,
                nranks=PROCESSES,
                pid=100 + process,
                enqueued=100,
                completed=None,
                last_call_ns=5000,
                in_flight=stall_facts.WEAK if comm == process else None,
            )
            for comm in range(PROCESSES)
            for process in range(PROCESSES)
        ]

    def waiting_elsewhere(self) -> tuple[Elsewhere, ...]:
        """Of the first communicator, as all its ranks but the first one ask."""
        by_comm: dict[str, list[RankFacts]] = {}
        by_process: dict[int, list[RankFacts]] = {}
        for rank in self.ranks:
            by_comm.setdefault(rank.comm, []).append(rank)
            by_process.setdefault(rank.pid, []).append(rank)
        ranks = Ranks(by_comm, by_process, self._facts_of, lambda _: None, self._lost_a_peer)
        return Dependencies(ranks).waiting_elsewhere(by_comm["0" * 16][1:])

    def _lost_a_peer(self, pid: int) -> bool:
        self.looked_at[pid] += 1
        return False

    def _facts_of(self, pid: int) -> ProcessFacts:
        self.looked_at[pid] += 1
        return stall_facts.STOPPED if pid == self.stopped else stall_facts.PROCESS


def test_a_process_is_looked_at_a_few_times_where_ways_cross() -> None:
    crossed = Crossed()
    found = crossed.waiting_elsewhere()
    assert {one.pid for one in found} == set(range(101, 108))
    assert {one.why for one in found} == {""}
    assert max(crossed.looked_at.values()) <= 2


def test_the_end_of_a_chain_is_found_where_ways_cross() -> None:
    crossed = Crossed(stopped=107)
    found = crossed.waiting_elsewhere()
    assert {one.pid for one in found} == set(range(101, 107))
    assert all("process 107 of its rank 7 is stopped" in one.why for one in found)


def chained_rank(comm: int, process: int) -> RankFacts:
    """Process n waits in communicator n for process n + 1."""
    return RankFacts(
        instance=2 * comm + process,
        comm=f"{comm:016x}",
        rank=process - comm,
        nranks=2,
        pid=100 + process,
        enqueued=100,
        completed=None,
        last_call_ns=5000,
        in_flight=stall_facts.WEAK if comm == process else None,
    )


@pytest.mark.parametrize(
    ("length", "why"),
    [
        (2, "process 102 of its rank 1 is stopped"),
        (3, f"and that because of communicator {2:016x}: process 103 of its rank 1 is stopped"),
        (50, f"and that, through 47 others, because of communicator {49:016x}: process 150 of its rank 1 is stopped"),
    ],
)
def test_of_a_long_chain_the_communicator_at_its_beginning_is_named(length: int, why: str) -> None:
    by_comm = {f"{comm:016x}": [chained_rank(comm, comm), chained_rank(comm, comm + 1)] for comm in range(length)}
    by_process: dict[int, list[RankFacts]] = {}
    for rank in (rank for ranks in by_comm.values() for rank in ranks):
        by_process.setdefault(rank.pid, []).append(rank)
    stopped = max(by_process)
    ranks = Ranks(
        by_comm,
        by_process,
        lambda pid: stall_facts.STOPPED if pid == stopped else stall_facts.PROCESS,
        lambda _: None,
        lambda _: False,
    )
    (found,) = Dependencies(ranks).waiting_elsewhere(by_comm["0" * 16][1:])
    assert (found.comm, found.why) == (f"{1:016x}", why)
