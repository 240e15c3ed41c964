"""How a verdict says what it found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cluster.verdict.quantities import decimal_bytes, duration, ranks_text
from tests.unit.fleets import only, stall, waiting


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_so_that_they_can_be_read_back(numbers: set[int]) -> None:
    text = ranks_text(map(str, numbers)).split(" ", 1)[1]
    read: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers


@given(st.lists(st.text(max_size=4) | st.just("²") | st.just("9" * 5000)))
def test_whatever_ranks_are_called_they_can_be_written(names: list[str]) -> None:
    assert ranks_text(names).startswith(("rank ", "ranks ", "an unknown rank"))


def test_amounts_are_written_as_link_speeds_are() -> None:
    assert [decimal_bytes(x) for x in (0, 999, 1e3, 1.25e9)] == ["0 B", "999 B", "1 kB", "1.25 GB"]


def test_who_is_in_the_communicator_is_told_first() -> None:
    assert only(waiting(4).rank(0, job="4711")).evidence[0] == "4 ranks on host0, host1, host2, host3; job 4711"


def test_weak_signs_of_a_stall_do_not_make_a_stopped_process_doubtful() -> None:
    fleets = waiting().rank(1, stall=stall("process_stopped", strength="weak"))
    assert "weak" not in only(fleets).headline
    assert "weak" in only(waiting().rank(1, stall=stall("rail_slow", device="eth0", strength="weak"))).headline


def test_a_stopped_process_is_strong_evidence_whatever_the_stall_is_known_by() -> None:
    stopped = only(waiting().rank(1, stall=stall("process_stopped", strength="weak")))
    assert stopped.strength == "strong"
    assert "host1 says process_stopped of rank 1" in stopped.evidence
    assert not any("weak" in line for line in (*stopped.evidence, *stopped.unknown))
    slow = only(waiting().rank(1, stall=stall("rail_slow", device="eth0", strength="weak")))
    assert slow.strength == "weak"
    assert "host1 says rail_slow of rank 1 (weak evidence)" in slow.evidence


def test_a_rail_whose_device_name_is_in_several_namespaces_is_named_with_its_own() -> None:
    where = {"rail": "0", "device": "eth0"}
    fleets = waiting().rail(1, 0, netns="pod7", up=False).rank(1, stall=stall("rail_down", netns="pod7", **where))
    assert "rail 0 (eth0 in pod7) of host1 is down" in only(fleets).headline
    plain = waiting().rail(1, 0, up=False).rank(1, stall=stall("rail_down", **where))
    assert "rail 0 (eth0) of host1 is down" in only(plain).headline


def test_a_rank_is_named_as_the_logs_of_its_job_number_it_too() -> None:
    stopped = only(waiting().rank(1, world_rank="9", stall=stall("process_stopped")))
    assert "rank 1 (rank 9 of the job, pid 101, host1) is stopped" in stopped.headline
    assert stopped.world_ranks == ("9",)
    both = waiting().all_say("process_stopped", blamed_rank="").rank(1, world_rank="9")
    assert (only(both).ranks, only(both).world_ranks) == (("0", "1"), ("", "9"))
    gone = only(waiting().rank(1, world_rank="9", stall=stall("process_gone", blamed_rank="1")))
    assert any("log of rank 9:" in step.why for step in gone.next_steps)
    same = only(waiting().rank(1, world_rank="1", stall=stall("process_stopped")))
    assert "rank 1 (pid 101, host1) is stopped" in same.headline


def test_commands_for_a_device_in_a_namespace_enter_it() -> None:
    on_rail = stall("rail_slow", rail="0", device="eth0", netns="pod7")
    fleets = waiting().rail(1, 0, netns="pod7").rank(1, netns="pod7", pid="4711", stall=on_rail)
    commands = [step.command for step in only(fleets).next_steps if step.command]
    assert commands
    assert all(command.startswith("nsenter -t 4711 -n ") for command in commands)
    gone = only(fleets.rank(0, host="host1", netns="pod7", pid="17", present=False))
    assert all(step.command.startswith("nsenter -t 4711 -n ") for step in gone.next_steps if step.command)
    elsewhere = only(fleets.rank(1, netns="", pid="4711", stall=on_rail))
    assert elsewhere.next_steps[0].command.startswith("nsenter -t PID -n ")
    usual = only(waiting().rail(1, 0).rank(1, stall=stall("rail_slow", rail="0", device="eth0")))
    assert not any("nsenter" in step.command for step in usual.next_steps)


def test_a_link_that_is_back_while_the_others_still_wait_was_down() -> None:
    was_down = waiting().rank(1, stall=stall("rail_down", rail="0", device="eth0"))
    assert "rail 0 (eth0) of host1 went down and is back" in only(was_down.rail(1, 0, up=True)).headline
    assert "rail 0 (eth0) of host1 is down" in only(was_down.rail(1, 0, up=False)).headline
    # Of the same name in another namespace nothing is known.
    inside = waiting().rank(1, stall=stall("rail_down", rail="0", device="eth0", netns="pod7")).rail(1, 0, up=True)
    assert "rail 0 (eth0 in pod7) of host1 is down" in only(inside).headline


def test_lengths_of_time_are_short() -> None:
    assert [duration(x) for x in (0.04, 9.96, 42.4, 185, 7800)] == [
        "0.0 s",
        "10.0 s",
        "42 s",
        "3 min 5 s",
        "2 h 10 min",
    ]


def test_a_rail_that_nothing_is_known_of_is_shown_as_such() -> None:
    fleets = waiting().rank(1, stall=stall("rail_slow", rail="7", device="ib7"))
    assert any("nothing is known" in line for line in only(fleets).evidence)
