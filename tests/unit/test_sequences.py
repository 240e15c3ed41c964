"""Where ranks stand by NCCL's own numbers, whenever the agent came; processes and communicators are simulated."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.collectives.sequences import Reckoning, Sequences
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.probes.nccl.layouts.layout import Layouts, Structure
from railscope.probes.nccl.memory.sequence_numbers import (
    FUNCTIONS,
    Launched,
    SequenceLayout,
    read_launched,
    sequence_layout,
)
from railscope.probes.nccl.records import calls as records
from railscope.probes.nccl.records.errors import COMMUNICATOR_MAGIC
from tests.unit.collectives_kernel import SimulatedTable

LAYOUT = SequenceLayout(
    comm_hash=8, sequence_numbers=0x100, group_next=0x200, shared_resources=0x300, persistent_refs=12
)
PID, ADDRESS, SHARED, HASH, INSTANCE, LIBRARY = 4711, 0x10000, 0x20000, 0xC0FFEE, 7, 3
NOW_NS = 10**12
"""Every call is of this moment."""


@dataclass
class Rank:
    """One rank's end of a communicator in a process's memory, and in the kernel's table since the agent came."""

    procfs: Path
    entered: int = 0
    """Collectives that NCCL counts, since the communicator was made."""
    watched: bool = False
    """At level watch: no call meets a probe."""
    uncounted: int = 0
    """Calls that met none."""
    table: SimulatedTable = field(
        default_factory=lambda: SimulatedTable(records.COMMUNICATOR_KEY, records.COMMUNICATOR)
    )

    def __post_init__(self) -> None:
        (self.procfs / str(PID)).mkdir(parents=True)
        self._memory = os.open(self.procfs / str(PID) / "mem", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._memory, 0x30000)
        self.write(ADDRESS, COMMUNICATOR_MAGIC)
        self.write(ADDRESS + LAYOUT.comm_hash, HASH)
        self.write(ADDRESS + LAYOUT.shared_resources, SHARED)
        self.leave()
        self._launched = [0] * FUNCTIONS
        self._key = struct.pack("<QII", ADDRESS, PID, 0)
        self.sequences = Sequences(
            self.table,
            ProcessMemory(self.procfs, InProcess(), lambda _pid: UNKNOWN_TENANT),
            lambda library: LAYOUT if library == LIBRARY and not self.watched else None,
            lambda _instance: self.uncounted,
        )

    def close(self) -> None:
        os.close(self._memory)

    def write(self, address: int, number: int) -> None:
        os.pwrite(self._memory, number.to_bytes(8, "little"), address)

    def agent_comes(self, *, nranks: int = 2, library: int = LIBRARY) -> None:
        row = np.zeros(1, records.COMMUNICATOR)
        row["instance"], row["confirmed"], row["library"] = INSTANCE, 1, library
        row["identity"]["comm_hash"], row["identity"]["nranks"] = HASH, nranks
        row["last_ns"] = NOW_NS
        self.table.rows[self._key] = row

    @property
    def calls(self) -> int:
        """That the agent counted."""
        return int(self.table.rows[self._key]["sequence"][0])

    def enter(self) -> None:
        """The probe at the function's entry runs; NCCL knows of nothing yet."""
        if self._key in self.table.rows:
            self.table.rows[self._key]["sequence"] += 1

    def join(self) -> None:
        self.write(ADDRESS + LAYOUT.group_next, 0)

    def launch(self, count: int = 1, function: int = 4) -> None:
        self._launched[function] += count
        self.entered += count
        self.write(ADDRESS + LAYOUT.sequence_numbers + 8 * function, self._launched[function])

    def leave(self) -> None:
        self.write(ADDRESS + LAYOUT.group_next, 1)

    def capture(self, references: int) -> None:
        """So many captured graphs live."""
        os.pwrite(self._memory, references.to_bytes(4, "little"), SHARED + LAYOUT.persistent_refs)

    def call(self, *, counted: bool = True) -> None:
        """A whole call; one that is not counted has no element, or is point to point."""
        self.enter()
        self.join()
        if counted:
            self.launch()
        self.leave()

    def look(self) -> int | None:
        """What the agent says after two more looks, of which the second finds that it stands."""
        self.sequences.read_changed(self.table.read(), NOW_NS)
        self.sequences.read_changed(self.table.read(), NOW_NS)
        return self.position

    @property
    def position(self) -> int | None:
        return self.sequences.position(INSTANCE, self.calls)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "proc")
    yield made
    made.close()


def running(rank: Rank, before: int = 1000) -> None:
    """A job that made calls before the agent came, and two since that the agent looked at."""
    for _ in range(before):
        rank.launch(function=2)
    rank.agent_comes()
    for _ in range(2):
        rank.call()
        rank.look()


def test_a_late_agent_knows_the_calls_that_it_did_not_see(rank: Rank) -> None:
    running(rank)
    assert rank.calls == 2
    assert rank.position == rank.entered == 1002


def test_one_call_is_not_enough_to_be_sure(rank: Rank) -> None:
    rank.launch(1000)
    rank.agent_comes()
    assert rank.look() is None
    rank.call()
    assert rank.look() is None
    assert rank.look() is None
    rank.call()
    assert rank.look() == 1002


def test_an_agent_from_the_start_says_the_same_as_one_that_came_late(rank: Rank, tmp_path: Path) -> None:
    early = Rank(tmp_path / "other")
    early.agent_comes()
    # Warm-up: what NCCL does not number.
    for counted in (True, False, False, True):
        early.call(counted=counted)
        early.look()
    rank.launch(2)
    rank.agent_comes()
    for _ in range(3):
        for one in (early, rank):
            one.call()
            one.look()
    assert (early.calls, rank.calls) == (7, 3)
    assert early.position == rank.position == 5
    early.close()


def test_between_two_looks_a_moving_rank_is_told_by_the_last_distance(rank: Rank) -> None:
    running(rank)
    rank.call()
    rank.call()
    assert rank.position == 1004


def test_a_rank_that_stands_in_the_middle_of_a_call_is_not_compared(rank: Rank) -> None:
    running(rank)
    rank.enter()
    rank.join()
    assert rank.look() is None
    assert rank.look() is None
    rank.launch()
    rank.leave()
    assert rank.look() == 1003


def test_a_rank_that_stands_behind_a_call_that_nccl_does_not_number_is_not_compared(rank: Rank) -> None:
    running(rank)
    rank.call(counted=False)
    assert rank.look() is None
    # It goes on as before, and is compared again, as one that never made that call.
    rank.call()
    assert rank.look() == 1003


def test_while_a_captured_graph_lives_nothing_is_said(rank: Rank) -> None:
    running(rank)
    rank.capture(1)
    rank.call()
    assert rank.look() is None
    rank.capture(0)
    assert rank.look() == 1003


def test_a_rank_that_calls_while_it_is_looked_at_is_learnt_nothing_of(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.launch(1000)
    rank.agent_comes()
    rank.call()

    def calls_of(_key: bytes, _instance: int) -> int | None:
        rank.enter()
        return rank.calls

    monkeypatch.setattr(rank.table, "calls_of", calls_of)
    for _ in range(4):
        assert rank.look() is None
        assert rank.sequences.position(INSTANCE, rank.calls + 1) is None


def test_what_cannot_be_read_any_more_is_not_said_any_more(rank: Rank) -> None:
    running(rank)
    rank.write(ADDRESS, 0)
    rank.call()
    assert rank.look() is None


def test_the_next_communicator_at_the_same_address_is_another(rank: Rank) -> None:
    running(rank)
    rank.write(ADDRESS + LAYOUT.comm_hash, HASH + 1)
    rank.call()
    rank.sequences.read_changed(rank.table.read(), NOW_NS)
    assert rank.sequences.position(INSTANCE + 1, 3) is None
    row = next(iter(rank.table.rows.values()))
    row["instance"], row["sequence"] = INSTANCE + 1, 3
    rank.sequences.read_changed(rank.table.read(), NOW_NS)
    assert rank.sequences.position(INSTANCE, 3) is None
    assert rank.sequences.position(INSTANCE + 1, 3) is None


@pytest.mark.parametrize("foreign", [{"nranks": 1}, {"library": LIBRARY + 1}])
def test_ranks_alone_and_unknown_builds_are_left_out(rank: Rank, foreign: dict[str, int]) -> None:
    rank.agent_comes(**foreign)
    for _ in range(4):
        rank.call()
        assert rank.look() is None


def test_a_rank_that_stands_between_calls_is_not_read_again(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    running(rank)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("its memory was opened"))
    for _ in range(3):
        assert rank.look() == 1002


def test_a_rank_that_moves_and_is_known_is_looked_at_now_and_then(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    running(rank)
    opened = []
    really_open = os.open

    def counting_open(path: Path, flags: int) -> int:
        opened.append(path)
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", counting_open)
    for _ in range(24):
        rank.call()
        rank.sequences.read_changed(rank.table.read(), NOW_NS)
        assert rank.position == rank.entered
    assert len(opened) == 3


def test_memory_that_may_not_be_read_is_said_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    rank.agent_comes()
    monkeypatch.setattr(os, "open", refused)
    with caplog.at_level(logging.WARNING, "railscope.sequences"):
        for _ in range(3):
            rank.call()
            assert rank.look() is None
    (said,) = caplog.messages
    assert "CAP_SYS_PTRACE" in said


def test_a_process_that_has_ended_is_no_trouble(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    running(rank)
    (rank.procfs / str(PID) / "mem").unlink()
    rank.call()
    rank.look()
    assert not caplog.messages


STEPS = st.lists(st.sampled_from(["enter", "join", "launch", "leave", "uncounted", "look"]), max_size=60)


@given(before=st.integers(0, 1 << 40), steps=STEPS)
def test_what_is_said_of_a_rank_that_stands_is_how_many_collectives_it_entered(before: int, steps: list[str]) -> None:
    """Whatever is looked at when: a call takes its steps in order, and some are not counted by NCCL.

    Looks within the first moment of a call, before NCCL knows of it, are left out: no two in a row fall there.
    """
    reckoning, calls, entered, launched, phase = Reckoning(), 0, before, before, "out"
    for step in [*steps, "look"]:
        if step == "enter" and phase == "out":
            calls, entered, phase = calls + 1, entered + 1, "in"
        elif step == "launch" and phase == "in":
            launched, phase = launched + 1, "launched"
        elif step == "leave" and phase == "launched":
            phase = "out"
        elif step == "uncounted" and phase == "out":
            calls += 1
        elif step == "look" and phase == "out":
            reckoning.add_sample(calls, launched)
        elif step == "look":
            reckoning.skip_sample(calls)
    said = reckoning.position(calls)
    assert said == (None if phase != "out" or said is None else entered)


@given(st.integers(0, 1 << 40), st.lists(st.integers(1, 1 << 20), min_size=2, max_size=10), st.data())
def test_with_collectives_only_it_is_known_after_two_looks_and_one_in_a_first_moment_does_no_harm(
    before: int, steps: list[int], data: st.DataObject
) -> None:
    reckoning, calls = Reckoning(), 0
    wrong = data.draw(st.none() | st.integers(0, len(steps) - 1))
    for number, step in enumerate(steps):
        calls += step
        reckoning.add_sample(calls, before + calls - (number == wrong))
    if wrong is None or wrong < len(steps) - 2:
        assert reckoning.position(calls) == before + calls
    else:
        assert reckoning.position(calls) in (None, before + calls)


def test_the_sum_over_functions_is_read(rank: Rank) -> None:
    for function in range(FUNCTIONS):
        rank.launch(10**function, function)
    each = (1, 10, 100, 1_000, 10_000)
    memory = os.open(rank.procfs / str(PID) / "mem", os.O_RDONLY)
    try:
        assert read_launched(memory, ADDRESS, HASH, LAYOUT) == Launched(11111, True, each)
        assert read_launched(memory, ADDRESS, HASH + 1, LAYOUT) is None
        assert read_launched(memory, ADDRESS + 8, HASH, LAYOUT) is None
        assert read_launched(memory, 1 << 62, HASH, LAYOUT) is None
        rank.join()
        assert read_launched(memory, ADDRESS, HASH, LAYOUT) == Launched(11111, False, each)
        rank.leave()
        rank.capture(1)
        assert read_launched(memory, ADDRESS, HASH, LAYOUT) == Launched(11111, False, each, captured=True)
    finally:
        os.close(memory)


COMM = Structure(0x400, {"commHash": 8, "seqNumber": 0x100, "groupNext": 0x200, "sharedRes": 0x300})
RESOURCES = Structure(0x40, {"persistentRefs": 12})


@pytest.mark.parametrize(
    ("version", "known"),
    [("2.26.2", True), ("2.32.3", True), ("3.0.1", True), ("2.25.1", False), ("2.23.4", False), ("unknown", False)],
)
def test_versions_that_count_for_a_profiler_only_are_left_out(version: str, known: bool) -> None:
    structures = {"ncclComm": COMM, "ncclSharedResources": RESOURCES}
    assert sequence_layout(structures, version) == (LAYOUT if known else None)


def test_a_build_that_lacks_a_field_is_left_out() -> None:
    assert sequence_layout({"ncclComm": COMM}, "2.32.3") is None
    lacking = Structure(COMM.size_bytes, {name: at for name, at in COMM.offsets.items() if name != "groupNext"})
    assert sequence_layout({"ncclComm": lacking, "ncclSharedResources": RESOURCES}, "2.32.3") is None


def test_every_known_build_since_the_first_version_that_counts_has_the_fields() -> None:
    layouts = Layouts.load()
    found = {
        build.nccl_version: sequence_layout(build.structures, build.nccl_version) is not None
        for build in layouts._builds.values()
    }
    assert found == {version: tuple(map(int, version.split(".")[:2])) >= (2, 26) for version in found}
    assert {version for version, known in found.items() if known} >= {"2.26.2", "2.27.7", "2.28.9", "2.32.3"}


@pytest.mark.parametrize("counted", [True, False])
def test_a_rank_that_has_made_no_call_for_long_is_looked_at_in_the_next_round(rank: Rank, counted: bool) -> None:
    """Rounds may be seconds apart, and the first verdict comes right after one."""
    running(rank)
    for _ in range(3):
        rank.call()
    rank.sequences.read_changed(rank.table.read(), NOW_NS)
    rank.call(counted=counted)
    rank.sequences.read_changed(rank.table.read(), NOW_NS + 1_000_000_000)
    assert rank.position == (rank.entered if counted else None)


def test_a_rank_that_stands_in_the_middle_of_a_call_is_not_taken_for_one_that_moves(rank: Rank) -> None:
    running(rank)
    rank.call()
    rank.sequences.read_changed(rank.table.read(), NOW_NS)
    rank.enter()
    rank.join()
    rank.sequences.read_changed(rank.table.read(), NOW_NS + 1_000_000_000)
    assert rank.position is None


def test_collectives_entered_before_the_agent_came_are_counted_as_missed(rank: Rank) -> None:
    running(rank, before=1000)
    assert rank.sequences.missed(INSTANCE) == 1000
    for _ in range(5):
        rank.call(counted=False)
    rank.look()
    assert rank.sequences.missed(INSTANCE) == 1000, "messages and empty calls of later take nothing away"
    rank.sequences.forget([INSTANCE])
    assert rank.sequences.missed(INSTANCE) is None


def test_what_was_never_compared_is_not_said_to_have_missed_nothing(rank: Rank) -> None:
    rank.agent_comes(library=LIBRARY + 1)
    rank.call()
    rank.look()
    assert rank.sequences.missed(INSTANCE) is None


def test_of_a_rank_seen_from_its_first_call_nothing_was_missed(rank: Rank) -> None:
    running(rank, before=0)
    assert rank.sequences.missed(INSTANCE) == 0


def test_calls_that_met_no_probe_meanwhile_change_nothing_of_what_was_missed_before(rank: Rank) -> None:
    running(rank)
    missed = rank.sequences.missed(INSTANCE)
    assert missed
    rank.watched = True
    rank.launch(500)
    rank.uncounted = 500
    rank.look()
    assert rank.sequences.missed(INSTANCE) == missed
    rank.watched = False
    for _ in range(3):
        rank.call()
        rank.look()
    assert rank.sequences.missed(INSTANCE) == missed
