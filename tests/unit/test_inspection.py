"""InspectionProcesses processes: what one tenant does to his own is nothing to the daemon and to others."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import pytest

from railscope.agent.node.inspection import inspection as inspection_module
from railscope.agent.node.inspection.inspection import (
    MOST_LATE_BYTES,
    MOST_PROCESSES,
    MOST_QUEUED,
    InspectionProcesses,
)
from railscope.agent.node.inspection.questions import Found, NotYet, Question, Refused
from railscope.agent.node.inspection.tenants import Tenant, tenant_of
from tests.unit.growth import lines_run
from tests.unit.inspection_questions import Code, Echo, Greedy, Opened, Pair, Rights, Stranger

MINE, YOURS = Tenant(5000), Tenant(5001)
A = TypeVar("A")


@pytest.fixture
def inspection() -> Iterator[InspectionProcesses]:
    made = InspectionProcesses(["tests.unit.inspection_questions"])
    yield made
    made.close()


def within(seconds: float, step: Callable[[], A | None]) -> A:
    """What `step` returns as soon as it is something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = step()
        if found is not None:
            return found
        time.sleep(0.005)
    raise AssertionError("it did not come in time")


def _answered(inspection: InspectionProcesses, tenant: Tenant, question: Question[A]) -> bool:
    try:
        inspection.ask(tenant, question)
    except NotYet:
        return False
    return True


def later(inspection: InspectionProcesses, tenant: Tenant, question: Question[A], seconds: float = 60.0) -> Found[A]:
    """The answer, however late."""

    def again() -> Found[A] | None:
        inspection.collect()
        try:
            return inspection.ask(tenant, question)
        except NotYet:
            return None

    return within(seconds, again)


def test_an_answer_comes_at_once_and_a_process_remembers(inspection: InspectionProcesses) -> None:
    assert later(inspection, MINE, Echo(1, "a")).answer == Pair(1, "a")
    assert later(inspection, MINE, Echo(1, "b")).answer == Pair(2, "b")
    assert later(inspection, YOURS, Echo(1, "c")).answer == Pair(1, "c")


def test_a_terminal_that_goes_ends_no_inspection(inspection: InspectionProcesses) -> None:
    assert later(inspection, MINE, Echo(1, "a")).answer == Pair(1, "a")
    maker = inspection._maker.pid
    made = Path(f"/proc/{maker}/task/{maker}/children").read_text().split()
    assert made
    for pid in (maker, *map(int, made)):
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    assert later(inspection, MINE, Echo(1, "b")).answer == Pair(2, "b")
    assert later(inspection, YOURS, Echo(1, "c")).answer == Pair(1, "c")


def test_who_takes_long_is_answered_later_and_nobody_else(inspection: InspectionProcesses) -> None:
    later(inspection, MINE, Echo(1, "first"))
    later(inspection, YOURS, Echo(2, "first"))
    began = time.monotonic()
    with pytest.raises(NotYet):
        inspection.ask(MINE, Echo(1, "slow", after_seconds=1.6))
    assert time.monotonic() - began < 1.5
    assert inspection.ask(YOURS, Echo(2, "swift")).answer == Pair(2, "swift")
    assert select.select([inspection], [], [], 5)[0]
    assert within(60, lambda: inspection.collect() or None) == {1}
    assert inspection.ask(MINE, Echo(1, "slow", after_seconds=1.6)).answer == Pair(2, "slow")


def test_the_daemon_waits_no_longer_than_a_second_for_all_tenants_together(inspection: InspectionProcesses) -> None:
    began = time.monotonic()
    for uid in range(MOST_PROCESSES):
        with pytest.raises(NotYet):
            inspection.ask(Tenant(6000 + uid), Echo(uid, "slow", after_seconds=2.5))
    # Each for itself would be waited for 16 s.
    assert time.monotonic() - began < 8


def test_who_takes_longer_than_the_question_allows_is_ended_and_rests(
    inspection: InspectionProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, well = Echo(7, "hangs", after_seconds=3600.0), Echo(8, "well")
    with caplog.at_level(logging.WARNING), pytest.raises(NotYet):
        inspection.ask(MINE, hangs)
    within(60, lambda: inspection.collect() is None or (True if inspection.late() else None))
    assert inspection.late() == {MINE: 1}
    assert "takes longer than 3 s" in caplog.text
    with pytest.raises(NotYet):
        inspection.ask(MINE, well)
    assert later(inspection, YOURS, well).answer == Pair(1, "well")
    assert later(inspection, MINE, well, seconds=20).answer == Pair(1, "well")
    with pytest.raises(NotYet):  # what hung rests for longer than who asked for it
        inspection.ask(MINE, hangs)


@pytest.mark.parametrize("question", [Greedy(1), Greedy(1, exits=True)])
def test_a_process_that_takes_too_much_memory_or_ends_is_the_tenants_loss(
    inspection: InspectionProcesses, question: Question[int]
) -> None:
    with pytest.raises(NotYet):
        inspection.ask(MINE, question)
    within(60, lambda: inspection.collect() is None or (True if inspection.late() else None))
    assert later(inspection, YOURS, Echo(2, "well")).answer == Pair(1, "well")


def test_an_answer_holds_nothing_but_what_the_question_names(inspection: InspectionProcesses, tmp_path: Path) -> None:
    for question in (Stranger(1), Code(1, str(tmp_path / "made"))):
        tenant = Tenant(7000 + question.__hash__() % 1000)
        with pytest.raises(NotYet):
            inspection.ask(tenant, question)
    within(60, lambda: inspection.collect() is None or (True if len(inspection.late()) == 2 else None))
    assert not (tmp_path / "made").exists()


def test_descriptors_go_both_ways_and_none_is_left_open(inspection: InspectionProcesses, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    later(inspection, MINE, Echo(1, "first"))
    before = set(Path("/proc/self/fd").iterdir())
    found = inspection.ask(MINE, Opened(1, str(file)))
    assert os.pread(found.descriptors[0], 100, 0) == b"content"
    assert inspection.ask(MINE, Opened(2, ""), found.descriptors).answer == b"content"
    os.close(found.descriptors[0])
    with pytest.raises(Refused, match="No such file") as refused:
        inspection.ask(MINE, Opened(1, str(tmp_path / "none")))
    assert refused.value.gone
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_questions_that_wait_have_a_bound_and_all_that_do_are_answered(inspection: InspectionProcesses) -> None:
    later(inspection, MINE, Echo(1, "first"))
    questions = [Echo(pid, "x", after_seconds=0.004) for pid in range(MOST_QUEUED + 800)]
    later_on = {question.pid for question in questions if not _answered(inspection, MINE, question)}
    come: set[int] = set()

    def all_came() -> bool | None:
        come.update(inspection.collect())
        return True if come >= later_on else None

    assert len(later_on) > MOST_QUEUED
    within(60, all_came)


def test_to_ask_costs_the_same_whatever_waits() -> None:
    inspection = InspectionProcesses(["tests.unit.inspection_questions"], tenants_patience_seconds=0.0)

    def ask_again() -> None:
        assert not _answered(inspection, MINE, waiting)

    try:
        under_way, waiting = Echo(0, "x", after_seconds=2.5), Echo(1, "x")
        for question in (under_way, waiting):
            assert not _answered(inspection, MINE, question)
        alone = lines_run(ask_again)
        for pid in range(2, MOST_QUEUED):
            assert not _answered(inspection, MINE, Echo(pid, "x"))
        waiting = Echo(MOST_QUEUED - 1, "x")
        assert lines_run(ask_again) <= 2 * alone
    finally:
        inspection.close()


def test_late_answers_of_a_tenant_have_a_bound_that_is_his_own(inspection: InspectionProcesses) -> None:
    later(inspection, YOURS, Echo(2, "first"))
    theirs = Echo(2, "yours", after_seconds=1.2)
    with pytest.raises(NotYet):
        inspection.ask(YOURS, theirs)
    large = [Echo(1, str(number), times=MOST_LATE_BYTES // 3) for number in range(6)]
    asked = [Echo(1, "first", after_seconds=1.2), *large]
    for question in asked:
        with pytest.raises(NotYet):
            inspection.ask(MINE, question)

    def answered() -> Literal[True] | None:
        inspection.collect()
        return None if inspection.busy else True

    within(60, answered)
    assert inspection.ask(YOURS, theirs).answer == Pair(2, "yours")
    assert inspection.ask(MINE, large[-1]).answer == Pair(len(asked), large[-1].value * large[-1].times)
    # Of all others at most three were kept; the rest is found anew, by a process that counts on.
    again = [later(inspection, MINE, question).answer.first > len(asked) for question in asked[:-1]]
    assert again.count(True) >= 4


def test_a_tenant_with_many_late_answers_pushes_out_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection_module, "MOST_LATE", 8)
    made = InspectionProcesses(["tests.unit.inspection_questions"])
    try:
        theirs = Echo(2, "yours", after_seconds=1.2)
        with pytest.raises(NotYet):
            made.ask(YOURS, theirs)
        for question in (Echo(1, "first", after_seconds=1.5), *(Echo(1, str(number)) for number in range(20))):
            with pytest.raises(NotYet):
                made.ask(MINE, question)

        def answered() -> Literal[True] | None:
            made.collect()
            return None if made.busy else True

        within(60, answered)
        assert len(made._late) == 8
        assert made.ask(YOURS, theirs).answer == Pair(1, "yours")
    finally:
        made.close()


def test_the_maker_of_processes_starts_again_when_it_has_ended(
    inspection: InspectionProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    later(inspection, MINE, Echo(1, "a"))
    os.kill(inspection._maker.pid, signal.SIGKILL)
    assert later(inspection, MINE, Echo(1, "b")).answer.second == "b"
    assert later(inspection, YOURS, Echo(1, "c")).answer.second == "c"
    assert sum("another one starts" in record.message for record in caplog.records) == 1


def test_a_maker_that_is_slow_to_start_is_waited_for_once_and_asked_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inspection = InspectionProcesses(["tests.unit.inspection_questions"], start_seconds=0.2)
    try:
        os.kill(inspection._maker.pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(20):
            with pytest.raises(NotYet):
                inspection.ask(MINE, Echo(1, "a"))
        assert time.monotonic() - began < 2 * 0.2 + 0.5
        assert sum("has not started within" in record.message for record in caplog.records) == 1
        os.kill(inspection._maker.pid, signal.SIGCONT)
        assert later(inspection, MINE, Echo(1, "b")).answer.second == "b"
    finally:
        inspection.close()


def test_an_inspection_process_may_read_and_nothing_else(inspection: InspectionProcesses, tmp_path: Path) -> None:
    effective, wrote, open_files = later(inspection, MINE, Rights(1, str(tmp_path / "out"))).answer
    assert not wrote
    assert int(effective, 16) & ~(1 << 2 | 1 << 19 | 1 << 21 | 1 << 40) == 0
    assert open_files <= 6


def test_closing_does_not_wait_and_leaves_no_process() -> None:
    inspection = InspectionProcesses(["tests.unit.inspection_questions"])
    with pytest.raises(NotYet):
        inspection.ask(MINE, Echo(1, "hangs", after_seconds=3600.0))
    children = Path(f"/proc/{inspection._maker.pid}/task/{inspection._maker.pid}/children").read_text().split()
    assert children
    began = time.monotonic()
    inspection.close()
    assert time.monotonic() - began < 1.0
    within(60, lambda: None if any(Path(f"/proc/{child}").exists() for child in children) else True)


def test_a_tenant_is_a_user_and_his_container(tmp_path: Path) -> None:
    def process(pid: int, uid: int, group: str) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t0\t0\t0\n")
        (folder / "cgroup").write_text(f"0::{group}\n")

    pod, container = "12345678-1234-1234-1234-123456789abc", "f" * 64
    process(1, 1000, "/user.slice/user-1000.slice")
    process(2, 0, f"/kubepods.slice/kubepods-pod{pod.replace('-', '_')}.slice/cri-containerd-{container}.scope")
    process(3, 0, f"/docker/{container}/docker/{'a' * 64}")
    assert tenant_of(tmp_path, 1) == Tenant(1000)
    assert tenant_of(tmp_path, 2) == Tenant(0, pod.replace("-", ""))
    assert tenant_of(tmp_path, 3) == Tenant(0, container)
    assert tenant_of(tmp_path, 4) == Tenant(None)
    assert [tenant_of(tmp_path, pid).label for pid in (1, 2, 4)] == ["1000", "0/123456781234", "unknown"]
