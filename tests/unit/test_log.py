"""Log lines: what is escaped, and how the journal gets them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cli.log import JsonFormatter, LogfmtFormatter

LOGS = """
import logging
from railscope.agent.cli.log import set_up_logging
set_up_logging("debug", "FORMAT")
log = logging.getLogger("railscope.some")
for write in (log.debug, log.info, log.warning, log.error, log.critical):
    write("a %s", "library")
"""


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("railscope.some", logging.WARNING, "", 0, "%s", (message,), None)


@given(st.text())
@pytest.mark.parametrize("formatter", [LogfmtFormatter(), JsonFormatter()])
def test_nothing_that_a_terminal_obeys_is_in_a_line(formatter: logging.Formatter, message: str) -> None:
    line = formatter.format(record(f"\x7f\x9b\u202e\n{message}"))
    assert line.isascii()
    assert line.isprintable()


def test_a_message_that_is_too_long_is_cut_and_tells_so() -> None:
    line = json.loads(JsonFormatter().format(record("n" * 1_000_000)))
    assert len(line["msg"]) < 5000
    assert line["msg"].endswith("... (1000000 characters)")


def lines(log_format: str, stream: str | None, path: Path) -> list[str]:
    """What a process logs into a file that it is told to be the journal."""
    with path.open("wb") as file:
        state = os.fstat(file.fileno())
        told = {"JOURNAL_STREAM": stream or f"{state.st_dev}:{state.st_ino}"}
        program = LOGS.replace("FORMAT", log_format)
        subprocess.run([sys.executable, "-c", program], env={**os.environ, **told}, stderr=file, check=True)
    return path.read_text().splitlines()


@pytest.mark.parametrize(("log_format", "begin"), [("logfmt", "ts="), ("json", "{")])
def test_the_journal_gets_each_line_s_priority(log_format: str, begin: str, tmp_path: Path) -> None:
    written = lines(log_format, None, tmp_path / "journal")
    assert [line[:3] for line in written] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert all(line[3:].startswith(begin) for line in written)


@pytest.mark.parametrize("stream", ["1:2", "nonsense"])
def test_another_stream_than_the_journal_gets_none(stream: str, tmp_path: Path) -> None:
    assert all(line.startswith("ts=") for line in lines("logfmt", stream, tmp_path / "file"))


@pytest.mark.parametrize("journal", [True, False])
def test_an_error_that_stops_a_command_is_one_in_the_journal_too(journal: bool, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    program = "import sys; from railscope.agent.cli.main import main; sys.exit(main())"
    with path.open("wb") as file:
        state = os.fstat(file.fileno())
        told = {"JOURNAL_STREAM": f"{state.st_dev}:{state.st_ino}"} if journal else {}
        words = ["agent", "--config.file", "/nonexistent/\x1b[31m"]
        done = subprocess.run([sys.executable, "-c", program, *words], env={**os.environ, **told}, stderr=file)
    assert done.returncode == 2
    (line,) = path.read_text().splitlines()
    assert line.startswith("<3>railscope: /nonexistent/\N{REPLACEMENT CHARACTER}[31m" if journal else "railscope: /non")
    assert line.isprintable()


def test_a_defect_s_traceback_is_errors_in_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    program = """
import threading
from railscope.agent.cli.log import set_up_logging
set_up_logging("info", "logfmt")
def fail():
    raise RuntimeError("first\\nsecond")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
"""
    with path.open("wb") as file:
        state = os.fstat(file.fileno())
        told = {"JOURNAL_STREAM": f"{state.st_dev}:{state.st_ino}"}
        assert subprocess.run([sys.executable, "-c", program], env={**os.environ, **told}, stderr=file).returncode == 1
    lines = path.read_text().splitlines()
    assert lines.count("<3>RuntimeError: first") == lines.count("<3>second") == 2
    assert all(line.startswith("<3>") for line in lines)
