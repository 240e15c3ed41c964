"""How the matrix judges what agents say, without any agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.matrix import MATRIX
from tests.faults.observation import Observation, expectation, summary, table, write_json
from tests.faults.randomised import random_scenarios
from tests.faults.scenarios import CALL_KINDS, NEVER_MS, Expected, Kind, Library, Load, fault, long_checkpoint
from tests.faults.short_table import controls_table, faults_table, last_line, read
from tests.faults.sightings import Accusation, Moment, Watcher, job_rank
from tests.faults.web import samples_of

STOPPED = Expected(frozenset({"process_stopped"}), host=1, rank=1)
DOWN = Expected(frozenset({"rail_down"}), host=1, rail=1)


def accusation(host: int, rank: str, cause: str, blamed_rank: str = "", rail: str = "") -> Accusation:
    return Accusation(host, "c0ffee", rank, cause, "strong", blamed_rank, rail)


def test_the_stopped_rank_must_be_named_on_its_own_host() -> None:
    assert accusation(1, "1", "process_stopped", "1").is_right(STOPPED)
    assert not accusation(0, "0", "process_stopped", "1").is_right(STOPPED)
    assert not accusation(1, "1", "process_stopped", "0").is_right(STOPPED)
    assert not accusation(1, "1", "rank_behind", "1").is_right(STOPPED)


def test_ranks_that_only_wait_are_no_wrong_accusation() -> None:
    assert not accusation(0, "0", "rank_behind").is_wrong(STOPPED)
    assert not accusation(0, "0", "rank_behind", "1").is_wrong(STOPPED)
    assert not accusation(0, "0", "unknown").is_wrong(DOWN)


def test_whoever_accuses_another_rank_or_a_rail_accuses_the_innocent() -> None:
    assert accusation(0, "0", "rank_behind", "2").is_wrong(STOPPED)
    assert accusation(0, "0", "rail_slow", rail="0").is_wrong(STOPPED)
    assert accusation(0, "0", "rail_filtered", rail="0").is_wrong(DOWN)
    assert accusation(0, "0", "process_stopped", "0").is_wrong(DOWN)
    assert not accusation(0, "0", "rail_filtered", rail="1").is_wrong(DOWN)
    assert accusation(0, "0", "rank_behind", "0").is_wrong(DOWN)
    assert not accusation(0, "0", "rank_behind", "1").is_wrong(DOWN)


def test_where_nobody_may_be_accused_everybody_is_innocent() -> None:
    assert accusation(0, "0", "unknown").is_wrong(Expected(frozenset()))


def test_other_hosts_may_say_that_they_wait_while_one_writes_and_its_own_host_may_not() -> None:
    writes = long_checkpoint("checkpoint", Library.NCCL, Load()).expected
    assert accusation(1, "1", "rank_behind").only_waits(writes)
    assert accusation(1, "1", "rank_behind", "0").only_waits(writes)
    assert not accusation(1, "1", "rank_behind", "1").only_waits(writes)
    assert not accusation(0, "1", "rank_behind", "0").only_waits(writes)
    assert not accusation(1, "1", "unknown").only_waits(writes)
    assert not accusation(1, "1", "rail_slow", rail="0").only_waits(writes)
    assert not accusation(1, "1", "rank_behind").only_waits(Expected(frozenset())), "every other control is silent"


def test_who_is_inside_a_call_is_told_of_and_nobody_is_accused() -> None:
    inside = fault(Kind.NO_PEER, Library.NCCL, 2).expected
    assert accusation(0, "0", "inside_call").is_right(inside)
    assert not accusation(0, "0", "rank_behind").is_right(inside)
    both = fault(Kind.RECEIVES, Library.NCCL, 2).expected
    assert accusation(1, "1", "inside_call").is_right(both)
    assert not accusation(1, "1", "inside_call").is_wrong(both)
    assert accusation(1, "1", "rank_behind").is_wrong(both)


def test_a_skipped_collective_is_told_by_those_who_wait() -> None:
    expected = fault(Kind.SKIP, Library.NCCL, 4).expected
    assert accusation(0, "0", "rank_behind").is_right(expected)
    assert accusation(3, "3", "rank_behind", "3").is_right(expected)
    assert not accusation(0, "0", "rank_behind", "2").is_right(expected)


def test_of_a_fault_in_the_switch_either_end_may_tell_and_must_name_the_rail() -> None:
    expected = fault(Kind.SLOW_IN_SWITCH, Library.NCCL, 2).expected
    assert accusation(0, "0", "rail_slow", rail="1").is_right(expected)
    assert accusation(1, "1", "rail_slow", rail="1").is_right(expected)
    assert not accusation(0, "0", "rail_slow", rail="0").is_right(expected)
    assert not accusation(0, "0", "rail_slow", rail="1").is_right(fault(Kind.SLOW, Library.NCCL, 2).expected)


def test_every_fault_happens_on_a_host_that_exists_and_expects_its_own_place() -> None:
    for scenario in (*MATRIX, *(drawn.scenario for drawn in random_scenarios(50, 7))):
        assert 0 <= scenario.place < scenario.hosts
        assert scenario.expected.rank in (None, scenario.target)
        assert scenario.kind in CALL_KINDS or scenario.loads[0].late_ms < NEVER_MS
        assert scenario.expected.rail in (None, scenario.rail)
    names = [(scenario.library, scenario.hosts, scenario.name) for scenario in MATRIX]
    assert len(set(names)) == len(names)


def test_a_seed_draws_the_same_again_and_another_seed_does_not() -> None:
    assert random_scenarios(10, 3) == random_scenarios(10, 3)
    assert random_scenarios(10, 3) != random_scenarios(10, 4)
    assert sum(drawn.scenario.control for drawn in random_scenarios(10, 3)) == 10


def observation(*, control: bool, problems: tuple[str, ...]) -> Observation:
    return Observation(
        "SIGSTOP", "nccl", 2, control, "process_stopped rank 1", "process_stopped", "rank 1 on host1",
        2.3, 2.3, 0.4, None, (), problems,
    )  # fmt: skip


def test_the_summary_counts_faults_and_false_alarms_apart() -> None:
    seen = [
        observation(control=False, problems=()),
        observation(control=False, problems=("nobody named it",)),
        observation(control=True, problems=("false alarm: x",)),
    ]
    assert summary(seen) == "1 of 2 faults named rightly, 1 false alarms in 1 controls"
    lines = table(seen).splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("ok")
    assert lines[2].endswith("FAILED: nobody named it")


def test_what_is_expected_is_said_in_words() -> None:
    words = [expectation(fault(kind, Library.WORKLOAD, 2)) for kind in (Kind.STOP, Kind.LINK_DOWN, Kind.SLOW_IN_SWITCH)]
    assert words == ["process_stopped rank 1", "rail_down rail 1", "rail_lossy or rail_slow rail 1"]


def test_only_the_samples_asked_for_are_read() -> None:
    text = '# HELP a x\n# TYPE a gauge\na{b="c,d"} 1\naa 2\nb 3\n'
    assert [(sample.name, dict(sample.labels), sample.value) for sample in samples_of(text, ["a", "b"])] == [
        ("a", {"b": "c,d"}, 1.0),
        ("b", {}, 3.0),
    ]


def test_the_short_table_counts_random_ones_with_the_matrix_and_libraries_apart(tmp_path: Path) -> None:
    named = observation(control=False, problems=())
    late = replace(named, scenario="7. SIGSTOP", delay_seconds=4.7)
    missed = replace(named, library="workload", cause="", delay_seconds=None, verdict=None, problems=("nobody",))
    alarm = observation(control=True, problems=("false alarm: x",))
    write_json(tmp_path / "run.json", [named, missed, alarm], [late], seed=1)
    rows = read(tmp_path / "run.json")
    assert faults_table(rows).splitlines()[2] == "| SIGSTOP | process_stopped | 0/1 | – | 2/2 | 3.5 s (2.3 to 4.7) |"
    assert controls_table(rows).splitlines()[2] == "| SIGSTOP | – | 0/1 |"
    assert last_line(rows).startswith("2/3 faults named rightly, 0/1 controls silent")


def test_ranks_have_the_job_s_numbers_and_stand_in_one_communicator_only() -> None:
    numbers = {("aa", "0"): "2", ("aa", "1"): "3", ("bb", "1"): "2"}
    assert [job_rank(numbers, comm, "1") for comm in ("aa", "bb", "other")] == ["3", "2", "1"]
    watcher = Watcher(Cluster())  # never entered: nobody is asked
    waits = replace(accusation(0, "3", "rank_behind"), comm="aa")
    again = replace(waits, comm="bb")
    stopped = [replace(accusation(1, "2", "process_stopped", "2"), comm=comm) for comm in ("aa", "bb")]
    watcher.moments = [Moment(1.0, frozenset({waits, again})), Moment(2.0, frozenset({waits, *stopped}))]
    assert watcher.in_two_places(2.0, but=2) == frozenset()
    assert watcher.in_two_places(2.0, but=3) == {"2"}
    assert watcher.in_two_places(1.0, but=2) == {"3"}
