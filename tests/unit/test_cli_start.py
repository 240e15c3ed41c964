"""The process of a command: Ctrl-C at any moment, and standard streams that are full, closed or a pipe nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Final

import pytest

RUN: Final = "import sys; from railscope.agent.cli.start import start; sys.exit(start())"
AT_IMPORT: Final = """
import os, signal, sys
class Ctrl_C:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
        return None
sys.meta_path.insert(0, Ctrl_C())
"""
"""Sends SIGINT to its own process when a module is about to be imported."""
INSTEAD: Final = """
import sys
from railscope.agent.cli import main as commands
def command(parsed):
{body}
    return 0
commands._config = command
"""
"""Runs this in the place of a command's work."""
CONFIG: Final = ("config", "show")


def run(
    program: str, *words: str, output: int = subprocess.PIPE, redirected: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-c", program, *words],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        # As a terminal's processes have it, whatever runs this test.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize(
    "module", ["railscope.agent.cli.main", "argparse", "railscope.agent.config.effective", "railscope.agent.cli.config"]
)
def test_ctrl_c_while_modules_are_imported_is_silent(module: str) -> None:
    done = run(AT_IMPORT.format(module=module) + RUN, *CONFIG)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    "module", ["numpy", "ibis", "duckdb", "railscope.agent.analysis.report.traffic_section", "pyarrow", "pandas"]
)
def test_ctrl_c_while_an_analysis_imports_is_silent(module: str, tmp_path: object) -> None:
    done = run(AT_IMPORT.format(module=module) + RUN, "report", str(tmp_path))
    assert done.returncode in (130, 2), done  # 2: it does not come as far as this module
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize(
    ("where", "body"),
    [
        ("Python", "    import os, signal; os.kill(os.getpid(), signal.SIGINT)\n    while True: pass"),
        (
            "a callback from C",
            "    import ctypes, os, signal, time\n"
            "    ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT))()\n"
            "    time.sleep(30)",
        ),
        (
            "a destructor",
            "    import os, signal, time\n"
            "    class Ends:\n"
            "        def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
            "    Ends()\n"
            "    time.sleep(30)",
        ),
        (
            "a library that makes an error of its own of it",
            "    import os, signal\n"
            "    try: os.kill(os.getpid(), signal.SIGINT)\n"
            "    except KeyboardInterrupt: raise RuntimeError('query interrupted') from None",
        ),
        ("the very end", "    import atexit, os, signal\n    atexit.register(os.kill, os.getpid(), signal.SIGINT)"),
        (
            "the wait for threads",
            "    import os, signal, threading, time\n"
            "    threading.Thread(target=lambda: (time.sleep(.3), os.kill(os.getpid(), signal.SIGINT),"
            " time.sleep(30))).start()",
        ),
    ],
)
def test_ctrl_c_ends_a_command_silently_wherever_it_comes(where: str, body: str) -> None:
    done = run(INSTEAD.format(body=body) + RUN, *CONFIG)
    assert (done.returncode, done.stderr) == (130, ""), where


def test_what_is_made_is_cleaned_up_after_ctrl_c() -> None:
    body = (
        "    import os, signal\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "    finally: print('cleaned up')"
    )
    done = run(INSTEAD.format(body=body) + RUN, *CONFIG)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "")


def test_a_defect_is_not_hidden() -> None:
    done = run(INSTEAD.format(body="    raise RuntimeError('a defect')") + RUN, *CONFIG)
    assert done.returncode == 1
    assert "RuntimeError: a defect" in done.stderr


@pytest.mark.parametrize("words", [("--help",), ("--version",), CONFIG, ("config", "show", "--json")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line_and_status_2(
    words: tuple[str, ...], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = run(RUN, *words, redirected=">/dev/full")
    assert (done.returncode, done.stderr) == (2, "railscope: standard output: No space left on device\n")


@pytest.mark.parametrize("words", [("--help",), CONFIG])
def test_a_pipe_that_nobody_reads_is_no_error(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(RUN, *words, output=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_streams_change_no_status(closed: str) -> None:
    assert (run(RUN, *CONFIG, redirected=closed).returncode, run(RUN, "agnet", redirected=closed).returncode) == (0, 2)
    assert "Traceback" not in run(RUN, "agnet", redirected=closed).stderr
