"""How real processes ended, asked of the kernel; and what of it is a failure."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.probes.processes.exit_status import exit_code, exited_badly, read_exit_status
from railscope.probes.processes.processes import ProcessIdentity, identity_of

PROC = Path("/proc")
KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


class Child:
    """A process that waits until it is told how to end."""

    def __init__(self) -> None:
        code = "import sys; sys.exit(int(sys.stdin.readline() or 0))"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        found = identity_of(PROC, self.process.pid)
        assert found is not None
        self.identity: ProcessIdentity = found
        self.pidfd = os.pidfd_open(self.process.pid)

    def leave(self, status: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{status}\n".encode())
        self.process.stdin.flush()
        self.ended()

    def ended(self) -> None:
        select.select([self.pidfd], [], [], 20)

    def status(self) -> int | None:
        return read_exit_status(PROC, self.identity, self.pidfd)


@pytest.fixture
def child() -> Iterator[Child]:
    one = Child()
    yield one
    one.process.kill()
    one.process.wait()
    assert one.process.stdin is not None
    one.process.stdin.close()
    os.close(one.pidfd)


def test_one_that_runs_has_no_status(child: Child) -> None:
    assert child.status() is None


@pytest.mark.parametrize("code", [0, 1, 3, 137])
def test_a_zombie_tells_what_it_returned(child: Child, code: int) -> None:
    child.leave(code)
    status = child.status()
    assert status is not None
    assert os.waitstatus_to_exitcode(status) == code


def test_a_zombie_tells_which_signal_killed_it(child: Child) -> None:
    child.process.send_signal(signal.SIGKILL)
    child.ended()
    status = child.status()
    assert status is not None
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_after_its_parent_took_notice_a_new_kernel_still_tells_and_an_old_one_does_not(child: Child) -> None:
    child.leave(3)
    child.process.wait()
    assert child.status() in ({3 << 8} if KERNEL >= (6, 15) else {3 << 8, None})


def test_a_parent_that_takes_notice_while_it_is_asked_hides_nothing_on_a_new_kernel(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(_procfs: Path, _identity: ProcessIdentity) -> None:
        child.process.wait()

    monkeypatch.setattr("railscope.probes.processes.exit_status._of_zombie", too_late)
    child.leave(3)
    assert child.status() in ({3 << 8} if KERNEL >= (6, 15) else {3 << 8, None})


def test_another_process_with_the_same_pid_tells_nothing(child: Child) -> None:
    child.leave(1)
    other = ProcessIdentity(child.identity.pid, child.identity.start_time_ticks + 1)
    reading, writing = os.pipe()
    try:
        assert read_exit_status(PROC, other, reading) is None, "a pipe is no pidfd"
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("status", "badly"),
    [
        (None, None),
        (0, False),
        (signal.SIGTERM, False),
        (signal.SIGINT, False),
        (signal.SIGHUP, False),
        ((128 + 15) << 8, False),
        ((128 + 2) << 8, False),
        (signal.SIGKILL, True),
        (signal.SIGSEGV, True),
        (signal.SIGABRT | 0x80, True),
        (1 << 8, True),
        (137 << 8, True),
    ],
)
def test_who_was_told_to_end_did_not_fail(status: int | None, badly: bool | None) -> None:
    assert exited_badly(exit_code(status)) is badly


@pytest.mark.parametrize("status", [0x7F, 0xFFFF])
def test_a_word_that_wait_would_not_say_is_not_known(status: int) -> None:
    assert exit_code(status) is None
    assert exited_badly(exit_code(status)) is None
