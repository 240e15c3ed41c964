"""The thread that asks for counters without an interpreter: files and netlink are real, odd answers are simulated."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.clock import SystemClock
from railscope.probes.native import beats
from railscope.probes.native.beats import Asked, BeatThread, FilesQuestion, Heard, TableQuestion
from railscope.probes.netdev.netlink import NLMSG_DONE, NLMSG_ERROR, NetlinkSocket
from railscope.probes.netdev.rtnetlink_counters import NetlinkCounters, parse_alike
from tests.unit.counter_files import showing

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
SEQUENCE = 77


@pytest.fixture
def thread() -> Iterator[BeatThread]:
    started = beats.start_thread()
    assert started is not None, f"{beats.LIBRARY} does not load: run 'make build'"
    yield started
    assert started.stop(30)


@contextmanager
def files(*texts: bytes) -> Iterator[FilesQuestion]:
    """Files that show this."""
    with showing(texts) as descriptors:
        yield FilesQuestion(descriptors)


def heard_when(asked: Asked, enough: Callable[[list[beats.Answer], Heard], bool]) -> tuple[list[beats.Answer], Heard]:
    """Everything heard until it is enough, and what was heard last."""
    everything: list[beats.Answer] = []
    end = time.monotonic() + 30
    while time.monotonic() < end:
        heard = asked.read_answers()
        everything += [one._replace(datagrams=[bytes(part) for part in one.datagrams]) for one in heard.answers]
        asked.release()
        if enough(everything, heard):
            return everything, heard
        time.sleep(0.001)
    raise AssertionError(f"not heard within 30 s: {everything}")


def ended(_beats: list[beats.Answer], heard: Heard) -> bool:
    return heard.ended


class TestFiles:
    def test_answers_are_what_the_files_show(self, thread: BeatThread) -> None:
        with files(b"12\n", b"9999999999999999999\n") as question:
            begun_ns = time.monotonic_ns()
            asked = thread.ask(question, MILLISECOND, begun_ns, 64)
            first, _ = heard_when(asked, lambda found, _: len(found) > 3)
            assert {one.datagrams[0] for one in first} == {b"|12\n|9999999999999999999\n|"}
            os.pwrite(question.descriptors[0], b"13\n", 0)
            after_ns = time.monotonic_ns()
            later, _ = heard_when(asked, lambda found, _: bool(found) and found[-1].before_ns > after_ns)
            assert later[-1].datagrams[0] == b"|13\n|9999999999999999999\n|"
            for one in (*first, *later):
                assert one.due_ns <= one.before_ns <= one.after_ns <= time.monotonic_ns()
                assert (one.due_ns - begun_ns) % MILLISECOND == 0, "the beat does not drift"
            assert asked.cancel(30 * SECOND)

    @settings(deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.integers(0, 10**25).map(lambda value: b"%d\n" % value),
                st.binary(max_size=24),
                st.text("0123456789|\n -+_.N/A", max_size=24).map(str.encode),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_nothing_but_numbers_is_ever_an_answer(self, texts: list[bytes]) -> None:
        thread = beats.start_thread()
        assert thread is not None
        with files(*texts) as question:
            asked = thread.ask(question, 10 * SECOND, time.monotonic_ns(), 4)
            (found, heard) = heard_when(asked, lambda found, heard: bool(found) or heard.ended)
            assert asked.cancel(30 * SECOND)
        plain = all(re.fullmatch(rb"[0-9]{1,19}\n", text) for text in texts)
        assert heard.ended is not plain
        assert [one.datagrams[0] for one in found] == ([b"|" + b"|".join(texts) + b"|"] if plain else [])
        assert thread.stop(30)

    def test_a_file_that_is_not_read_ends_its_question_and_no_other(self, thread: BeatThread, tmp_path: Path) -> None:
        folder = os.open(tmp_path, os.O_RDONLY)
        with files(b"1\n") as question:
            try:
                other = thread.ask(question, MILLISECOND, time.monotonic_ns(), 64)
                broken = thread.ask(FilesQuestion((folder,)), MILLISECOND, time.monotonic_ns(), 64)
                assert heard_when(broken, ended)[0] == []
                other.read_answers()
                assert heard_when(other, lambda found, _: len(found) > 3)[0]
                assert broken.cancel(30 * SECOND)
                assert other.cancel(30 * SECOND)
            finally:
                os.close(folder)

    def test_beats_without_room_for_their_answer_are_counted_as_missed(self, thread: BeatThread) -> None:
        with files(b"1\n") as question:
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 4)
            time.sleep(0.05)
            heard = asked.read_answers()
            assert len(heard.answers) == 4
            assert heard.missed > 4
            asked.release()
            again, heard = heard_when(asked, lambda found, _: len(found) > 8)
            assert all(one.datagrams[0] == b"|1\n|" for one in again)
            beats_between = (again[-1].due_ns - again[0].due_ns) // MILLISECOND + 1
            assert beats_between >= len(again)
            assert asked.cancel(30 * SECOND)

    def test_nothing_is_asked_in_a_pause(self, thread: BeatThread) -> None:
        with files(b"1\n") as question:
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 256)
            assert asked.pause(30 * SECOND)
            paused_ns = time.monotonic_ns()
            time.sleep(0.02)
            resumed_ns = time.monotonic_ns()
            asked.resume()
            found, _ = heard_when(asked, lambda found, _: bool(found) and found[-1].before_ns > resumed_ns)
            assert not [one for one in found if paused_ns < one.before_ns < resumed_ns]
            assert asked.cancel(30 * SECOND)

    def test_each_question_has_a_period_of_its_own(self, thread: BeatThread) -> None:
        with files(b"1\n") as often, files(b"2\n") as seldom:
            begun_ns = time.monotonic_ns()
            both = [thread.ask(often, MILLISECOND, begun_ns, 512), thread.ask(seldom, 7 * MILLISECOND, begun_ns, 512)]
            slow, _ = heard_when(both[1], lambda found, _: len(found) > 5)
            quick = both[0].read_answers().answers
            assert {one.due_ns - begun_ns for one in slow} <= set(range(0, SECOND, 7 * MILLISECOND))
            assert len(quick) > len(slow)
            assert {bytes(one.datagrams[0]) for one in quick} == {b"|1\n|"}
            assert [one.cancel(30 * SECOND) for one in both] == [True, True]

    def test_it_asks_while_the_interpreter_is_busy(self, thread: BeatThread) -> None:
        with files(b"1\n") as question:
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 2048)
            begun_ns = time.monotonic_ns()
            pow(7, 600_000)  # one call, which does not let go of the interpreter
            done_ns = time.monotonic_ns()
            inside = [one for one in asked.read_answers().answers if begun_ns < one.before_ns < done_ns]
            assert len(inside) > 3
            assert asked.cancel(30 * SECOND)


class TestTables:
    def test_the_kernels_table_is_answered_whole(self, thread: BeatThread) -> None:
        with closing(NetlinkCounters(SystemClock())) as counters:
            question = counters.question()
            assert question is not None
            assert counters.question() is question
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 64)
            found, _ = heard_when(asked, lambda found, _: len(found) > 5)
            assert asked.cancel(30 * SECOND)
            alike = parse_alike([[one.datagrams[0]] for one in found])
            assert alike is not None
            names = dict(socket.if_nameindex())
            assert [names[index] for index in alike[0]] == list(counters.read().names)
            assert counters.question() is not question, "what was asked for oneself is another question then"

    def test_what_others_left_is_read_away_before_a_table_is_asked_for_again(self) -> None:
        with closing(NetlinkSocket()) as route:
            first = route.table_question(94, struct.pack("=BxxxII", 0, 0, 1))
            assert first is not None
            os.write(first.descriptor, first.request)  # and never read
            again = route.table_question(94, struct.pack("=BxxxII", 0, 0, 1))
            assert again is not None
            assert again.request != first.request, "with a number of its own"

    @pytest.mark.parametrize(
        "answer",
        [
            lambda: head(2, 92, 40) + done(sequence=SEQUENCE + 1),
            lambda: head(SEQUENCE + 1, 92, 40) + done(),
            lambda: head(SEQUENCE, 92, 40) + done(flags=0x12),
            lambda: head(SEQUENCE, 92, 40) + done(number=-4),
            lambda: head(SEQUENCE, 92, 40),
            lambda: head(SEQUENCE, 92, 4000) + done(),
            lambda: struct.pack("=IHHIIi", 20, NLMSG_ERROR, 0, SEQUENCE, 0, -1),
            lambda: b"",
        ],
        ids=[
            "another's end",
            "another's beginning",
            "changed meanwhile",
            "an error at the end",
            "no end",
            "too long",
            "an error",
            "nothing",
        ],
    )
    def test_an_answer_that_is_no_whole_table_ends_the_question(
        self, thread: BeatThread, answer: Callable[[], bytes]
    ) -> None:
        with kernel() as (side, question):
            side.send(head(SEQUENCE, 92, 40) + done())
            side.send(answer())
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 16)
            found, _ = heard_when(asked, ended)
            assert [one.datagrams[0] for one in found] == [head(SEQUENCE, 92, 40) + done()]
            assert asked.cancel(30 * SECOND)

    def test_a_long_answer_takes_the_beats_that_it_covers_and_others_that_it_would_crowd(
        self, thread: BeatThread
    ) -> None:
        with kernel() as (side, question):
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 16)
            side.recv(100)
            time.sleep(0.03)
            assert not asked.pause(0), "it is being asked"
            asked.resume()
            side.send(head(SEQUENCE, 92, 40) + done())
            (found, heard) = heard_when(asked, lambda found, _: bool(found))
            took_ns = found[0].after_ns - found[0].before_ns
            assert heard.missed + heard.spared >= took_ns // MILLISECOND
            assert heard.due_ns > found[0].after_ns
            side.send(b"")  # a second question is not to wait for long
            assert asked.cancel(30 * SECOND)

    def test_a_question_that_hangs_is_left_to_itself(self, thread: BeatThread) -> None:
        with kernel() as (side, question):
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 16)
            side.recv(100)
            assert not asked.cancel(MILLISECOND)
            assert not thread.stop(0.01)
            assert thread.thread.is_alive()
            side.send(b"")
            assert thread.stop(30)

    def test_a_socket_that_was_closed_while_it_hung_is_no_other_one(self, thread: BeatThread) -> None:
        with kernel() as (side, question):
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 16)
            side.recv(100)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            with ours, theirs:
                os.dup2(theirs.fileno(), question.descriptor)
                ours.send(b"not for the thread")
                side.send(head(SEQUENCE, 92, 40) + done())
                assert (
                    heard_when(asked, lambda found, _: bool(found))[0][0].datagrams[0]
                    == head(SEQUENCE, 92, 40) + done()
                )
                side.recv(100)
                side.send(b"")
                assert theirs.recv(100) == b"not for the thread"
            assert asked.cancel(30 * SECOND)

    def test_a_request_that_is_too_long_is_refused(self, thread: BeatThread) -> None:
        with kernel() as (_, question), pytest.raises(OSError, match="Message too long"):
            thread.ask(TableQuestion(question.descriptor, bytes(65), 60), MILLISECOND, 0, 16)


class TestNews:
    def test_whoever_waits_is_told_that_a_question_ended(self, thread: BeatThread) -> None:
        with files(b"N/A\n") as question:
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 4)
            thread.wait(None)
            assert asked.ended()
            assert asked.cancel(30 * SECOND)

    def test_whoever_waits_can_be_rung_also_before_he_does(self, thread: BeatThread) -> None:
        thread.wake()
        thread.wait(None)
        waiting = threading.Thread(target=thread.wait, args=(None,))
        waiting.start()
        thread.wake()
        waiting.join(30)
        assert not waiting.is_alive()

    def test_nobody_waits_longer_than_he_said(self, thread: BeatThread) -> None:
        until_ns = time.monotonic_ns() + 5 * MILLISECOND
        thread.wait(until_ns)
        assert time.monotonic_ns() >= until_ns

    def test_it_is_known_whether_an_answer_is_waited_for(self, thread: BeatThread) -> None:
        assert not thread.hangs(time.monotonic_ns(), 0)
        with kernel() as (side, question):
            asked = thread.ask(question, MILLISECOND, time.monotonic_ns(), 16)
            side.recv(100)
            assert thread.hangs(time.monotonic_ns() + 1, 0)
            assert not thread.hangs(time.monotonic_ns(), 30 * SECOND)
            side.send(b"")
            assert heard_when(asked, ended)[0] == []
            assert not thread.hangs(time.monotonic_ns() + 1, 0)
            assert asked.cancel(30 * SECOND)


class TestLibraries:
    @pytest.fixture(autouse=True)
    def _anew(self) -> Iterator[None]:
        beats._library.cache_clear()
        yield
        beats._library.cache_clear()

    @pytest.mark.parametrize(
        ("library", "said"), [("libc.so.6", "another version"), ("/nowhere/beats.so", "cannot open")]
    )
    def test_a_library_that_does_not_serve_is_named_and_python_reads(
        self, library: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(beats, "LIBRARY", library)
        with caplog.at_level("INFO", "railscope.beats"):
            assert beats.start_thread() is None
            assert beats.start_thread() is None
        (line,) = caplog.messages
        assert line.startswith("counters are read by Python")
        assert said in line

    def test_where_there_is_no_room_for_a_thread_python_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert beats.start_thread() is None


def test_a_thread_ends_without_questions() -> None:
    thread = beats.start_thread()
    assert thread is not None
    assert thread.thread in threading.enumerate()
    assert thread.stop(30)


def head(sequence: int, kind: int, payload: int) -> bytes:
    """A netlink message."""
    return struct.pack("=IHHII", 16 + payload, kind, 2, sequence, 0) + bytes(payload)


def done(sequence: int = SEQUENCE, flags: int = 2, number: int = 0) -> bytes:
    return struct.pack("=IHHIIi", 20, NLMSG_DONE, flags, sequence, 0, number)


@contextmanager
def kernel() -> Iterator[tuple[socket.socket, TableQuestion]]:
    """The other end of a socket that takes the place of netlink's, and a question."""
    side, asker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with side, asker:
        side.settimeout(30)
        asker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("=qq", 30, 0))
        request = struct.pack("=IHHIIBxxxII", 28, 94, 0x301, SEQUENCE, 0, 0, 0, 1)
        yield side, TableQuestion(asker.fileno(), request, 100)
