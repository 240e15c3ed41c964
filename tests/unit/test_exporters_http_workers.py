"""Workers of the server: pages rendered once for all, passwords checked in turns, refusals told once."""

from __future__ import annotations

import base64
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import bcrypt
import pytest

from railscope.exporters.series.text import Format
from railscope.exporters.web.auth import BasicAuth
from railscope.exporters.web.cpu_share import CpuShare
from railscope.exporters.web.pages import Answer, Page, one_line_answer
from railscope.exporters.web.password_checks import Checked, PasswordChecks
from railscope.exporters.web.refusals import Reason, Refusals
from railscope.exporters.web.rendering import Rendered, Renderings

PLAIN = Page("/metrics", Format.PROMETHEUS)
PACKED = Page("/metrics", Format.PROMETHEUS, gzip=True)


class Gate:
    """Lets renderings, or checks, through one by one."""

    def __init__(self) -> None:
        self.begun: queue.Queue[object] = queue.Queue()
        self._go_on = threading.Semaphore(0)

    def let_through(self, count: int = 1) -> None:
        self._go_on.release(count)

    def render(self, page: Page) -> Answer:
        self.begun.put(page)
        assert self._go_on.acquire(timeout=20)
        return one_line_answer(200, "rendered")  # type: ignore[arg-type]


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate()
    yield one
    one.let_through(1000)


class Results(queue.Queue[Rendered[str]]):
    def next(self) -> tuple[str, ...]:
        return self.get(timeout=20).waiters


def renderings(gate: Gate, results: Results) -> Renderings[str]:
    return Renderings("test-render", gate.render, results.put, share=0.5)


def test_all_who_ask_before_a_rendering_begins_share_it(gate: Gate) -> None:
    results = Results()
    pages = renderings(gate, results)
    pages.ask(PLAIN, "first")
    assert gate.begun.get(timeout=20) == PLAIN
    for number in range(1000):
        pages.ask(PLAIN, f"{number}")
    pages.ask(PACKED, "packed")
    gate.let_through(3)
    assert results.next() == ("first",)
    assert len(results.next()) == 1000
    assert results.next() == ("packed",)
    assert pages.close(20)


def test_what_nobody_waits_for_any_more_is_not_rendered(gate: Gate) -> None:
    results = Results()
    pages = renderings(gate, results)
    pages.ask(PLAIN, "first")
    assert gate.begun.get(timeout=20) == PLAIN
    pages.ask(PACKED, "gone")
    pages.ask(PLAIN, "stays")
    pages.withdraw(PACKED, "gone")
    gate.let_through(2)
    assert [results.next(), results.next()] == [("first",), ("stays",)]
    assert pages.close(20)
    assert [gate.begun.get_nowait()] == [PLAIN]
    assert gate.begun.empty()


def test_a_page_that_cannot_be_rendered_ends_neither_the_worker_nor_the_other_pages() -> None:
    results = Results()

    def render(page: Page) -> Answer:
        if page.gzip:
            raise RuntimeError("no")
        return one_line_answer(200, "rendered")  # type: ignore[arg-type]

    pages: Renderings[str] = Renderings("test-render", render, results.put, share=0.5)
    for page in (PACKED, PLAIN):
        pages.ask(page, "me")
    failed, fine = results.get(timeout=20), results.get(timeout=20)
    assert (failed.answer, str(failed.error)) == (None, "no")
    assert fine.answer is not None
    assert pages.close(20)


def test_a_share_of_a_core_allows_a_burst_and_then_no_more_than_itself() -> None:
    share = CpuShare(0.5, 3.0, 0.0)
    now = taken = 0.0
    while now < 60.0:
        rest = share.rest_seconds(now)
        if rest:
            now += max(rest, 0.001)
            continue
        now += 0.1
        taken += 0.1
        share.record(0.1, now)
        if taken <= 3.0:
            assert share.rest_seconds(now) == 0, "a burst is not slowed"
    assert 0.5 * 60 <= taken <= 0.5 * 60 + 3.2


def test_who_pauses_is_never_told_to_rest() -> None:
    share = CpuShare(0.5, 3.0, 0.0)
    for second in range(1000):
        assert share.rest_seconds(float(second)) == 0
        share.record(0.4, second + 0.4)


class SlowAuth(BasicAuth):
    """Says what it checks, and waits to be let through."""

    def __init__(self, gate: Gate) -> None:
        super().__init__({"ada": bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()})
        self._gate = gate

    def accepts(self, authorization: str) -> bool:
        self._gate.render(PLAIN)
        return super().accepts(authorization)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_passwords_of_lines_that_guessed_least_come_first_in_turns_and_of_a_line_the_newest(gate: Gate) -> None:
    results: queue.Queue[Checked[str]] = queue.Queue()
    checks: PasswordChecks[str] = PasswordChecks("test-auth", results.put)
    auth = SlowAuth(gate)
    checks.ask(auth, basic("eve", "0"), "10.0.0.1", "under way")
    gate.begun.get(timeout=20)
    for number in range(1, 6):
        checks.ask(auth, basic(f"eve{number}", "x"), "10.0.0.1", f"unknown {number}")
    checks.ask(auth, basic("ada", "wrong"), "10.0.0.1", "known, wrong")
    checks.ask(auth, basic("ada", "right"), "10.0.0.1", "known, right")
    checks.ask(auth, basic("ada", "right"), "10.0.0.2", "elsewhere")
    checks.withdraw("unknown 5")
    gate.let_through(20)
    order = [results.get(timeout=20) for _ in range(8)]
    assert [one.waiter for one in order] == [
        "under way",
        "known, right",
        "elsewhere",
        "known, wrong",
        "unknown 4",
        "unknown 3",
        "unknown 2",
        "unknown 1",
    ]
    assert {one.waiter for one in order if one.right} == {"known, right", "elsewhere"}
    assert checks.close(20)


def test_guesses_of_many_addresses_come_after_the_first_of_another_and_are_forgotten_with_time(gate: Gate) -> None:
    results: queue.Queue[Checked[str]] = queue.Queue()
    now = [100.0]
    checks: PasswordChecks[str] = PasswordChecks("test-auth", results.put, now=lambda: now[0])
    auth = SlowAuth(gate)
    gate.let_through(2)
    for address in ("10.0.0.1", "10.0.0.2"):
        checks.ask(auth, basic("ada", "wrong"), address, address)
        assert results.get(timeout=20) == Checked(address, right=False, wrong_lately=1.0)
    checks.ask(auth, basic("ada", "wrong"), "10.0.0.1", "under way")
    for _ in range(3):
        gate.begun.get(timeout=20)
    for address in ("10.0.0.1", "10.0.0.2"):
        for number in range(5):
            checks.ask(auth, basic("ada", "wrong"), address, f"{address} {number}")
    checks.ask(auth, basic("ada", "right"), "10.0.0.3", "first")
    gate.let_through(12)
    order = [results.get(timeout=20) for _ in range(12)]
    assert [one.waiter for one in order[:4]] == ["under way", "first", "10.0.0.2 4", "10.0.0.1 4"]
    assert [one.wrong_lately for one in order[:4]] == [2.0, 0.0, 2.0, 3.0]
    now[0] += 30.0
    gate.let_through()
    checks.ask(auth, basic("ada", "wrong"), "10.0.0.2", "later")
    assert results.get(timeout=20).wrong_lately == 6 / 2 + 1
    assert checks.close(20)


class BrokenAuth(BasicAuth):
    def accepts(self, authorization: str) -> bool:
        raise RuntimeError(authorization)


def test_a_password_that_cannot_be_checked_is_a_wrong_one(caplog: pytest.LogCaptureFixture) -> None:
    results: queue.Queue[Checked[str]] = queue.Queue()
    checks: PasswordChecks[str] = PasswordChecks("test-auth", results.put)
    for waiter in ("one", "two"):
        checks.ask(BrokenAuth({}), basic("ada", "secret"), "10.0.0.1", waiter)
        assert results.get(timeout=20).right is False
    assert checks.close(20)
    assert basic("ada", "secret") not in caplog.text


def test_more_passwords_than_are_kept_turn_away_the_oldest_of_who_sends_most(gate: Gate) -> None:
    results: queue.Queue[Checked[str]] = queue.Queue()
    checks: PasswordChecks[str] = PasswordChecks("test-auth", results.put)
    auth = SlowAuth(gate)
    with ExitStack() as ending:
        ending.callback(checks.close, 20)
        ending.callback(gate.let_through, 1000)
        checks.ask(auth, basic("ada", "0"), "10.0.0.9", "under way")
        gate.begun.get(timeout=20)
        assert checks.ask(auth, basic("ada", "right"), "10.0.0.2", "alone") is None
        dropped = [checks.ask(auth, basic("ada", f"{number}"), "10.0.0.1", f"{number}") for number in range(68)]
        assert dropped == [None] * 64 + ["0", "1", "2", "3"]
        for address in range(3, 6):
            for number in range(64):
                checks.ask(auth, basic("ada", "x"), f"10.0.0.{address}", f"{address} {number}")
        gate.let_through(1000)
        checked = [results.get(timeout=20).waiter for _ in range(1 + 128)]
        assert "alone" in checked


def test_refusals_are_told_once_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    with caplog.at_level(logging.DEBUG, "railscope.http"):
        for number in range(1000):
            refusals.record(Reason.UNREAD, f"10.0.0.1: number {number}", number / 100)
        refusals.record(Reason.FAILED, "10.0.0.2: OSError: gone", 11.0)
        assert refusals.due == 60.0
        refusals.tell(59.0)
        refusals.tell(60.0)
        refusals.tell(119.0)
        refusals.tell(120.0)
        refusals.record(Reason.UNREAD, "10.0.0.1: again", 121.0)
    assert [record.getMessage() for record in caplog.records] == [
        "10.0.0.1: number 0",
        "10.0.0.2: OSError: gone",
        "10.0.0.1: number 999; 999 of this kind within a minute",
        "10.0.0.1: again",
    ]
    assert (refusals.counts()["unread"], refusals.counts()["failed"], refusals.counts()["idle"]) == (1001, 1, 0)


def test_nothing_is_due_where_nobody_was_refused() -> None:
    assert Refusals().due == float("inf")


def test_a_worker_that_hangs_does_not_hold_up_the_end(gate: Gate) -> None:
    results = Results()
    pages = renderings(gate, results)
    pages.ask(PLAIN, "first")
    gate.begun.get(timeout=20)
    assert not pages.close(0.01)
