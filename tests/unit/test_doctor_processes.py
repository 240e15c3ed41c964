"""What the doctor says of the processes that have NCCL mapped, of real processes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from railscope.agent.doctor import processes as doctor_processes
from railscope.agent.doctor.processes import MOST_TOLD, check_processes
from railscope.probes.clock import SystemClock
from railscope.probes.processes.owner import ProcessOwner
from railscope.probes.processes.processes import PROCFS, ProcessIdentity
from tests.unit.test_process_owner import waiting

HOSTILE = (b"/opt/\x1b[31mpython3", b"train.py", b"--api-key=hunter2", b"\x1b]0;owned\x07\n", b"x" * 100_000)


def test_a_process_is_told_with_user_program_and_what_it_takes_but_not_its_arguments() -> None:
    with waiting(*HOSTILE) as identity:
        (finding,), (report,) = check_processes(PROCFS, [identity], SystemClock(), command_lines=False)
    assert finding.what.startswith(f'process {identity.pid} of {report.user}, "python3 train.py": ')
    assert finding.what.endswith("% of a processor, 0.0 GB resident, 1 thread")
    assert (report.program, report.command_line, report.threads) == ("python3 train.py", None, 1)
    assert report.user
    assert report.cpu_ratio is not None
    assert report.resident_bytes is not None
    assert report.start_realtime_ns is not None
    assert abs(report.start_realtime_ns - time.time_ns()) < 60e9


def test_command_lines_are_told_where_they_are_asked_for_without_what_a_terminal_obeys() -> None:
    with waiting(*HOSTILE) as identity:
        (finding,), (report,) = check_processes(PROCFS, [identity], SystemClock(), command_lines=True)
    assert report.command_line == "/opt/python3 -s train.py --api-key=hunter2 "
    assert finding.what.endswith(f"command line: {report.command_line}")
    assert finding.what.isprintable()


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as others, waiting() as stays:
        ending = ExitStack()
        goes = ending.enter_context(waiting())
        others.callback(ending.close)

        clock = SystemClock()
        monkeypatch.setattr(clock, "sleep", lambda _seconds: ending.close())
        _, reports = check_processes(PROCFS, [goes, stays], clock, command_lines=False)
    assert [report.pid for report in reports] == [stays.pid]


def test_of_4000_processes_text_tells_of_some_and_json_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_processes, "owner_of", lambda _procfs, one: ProcessOwner(one, "ada", "python3 train.py"))
    identities = [ProcessIdentity(1 << 22 | number, 1) for number in range(4000)]
    findings, reports = check_processes(Path("/nowhere"), identities, SystemClock(), command_lines=False)
    assert len(reports) == 4000
    assert len(findings) == MOST_TOLD + 1
    assert findings[-1].what == f"{4000 - MOST_TOLD} more with NCCL (--json lists them)"
    assert reports[0].cpu_ratio is None


def test_a_host_without_such_processes_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    monkeypatch.setattr(clock, "sleep", lambda _seconds: pytest.fail("it was watched"))
    assert check_processes(PROCFS, [], clock, command_lines=True) == ([], ())
