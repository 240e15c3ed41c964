"""Slurm's prolog and epilog whatever answers at the agent's port: Slurm drains a node whose script fails.

Each runs as Slurm runs it, with programs in its path that note what they are told, and less time than on a node.
"""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.nccl.library import REPOSITORY
from tests.serving import running

SLURM: Final = REPOSITORY / "deploy/slurm"
LESS_SECONDS: Final = 0.5
RUN: Final = f"""\
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.SourceFileLoader("script", sys.argv[1])
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("script", loader))
loader.exec_module(script)
script.MOST_SECONDS = {LESS_SECONDS}
sys.exit(script.main())
"""
HEAD: Final = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"
METRICS: Final = b'railscope_comm_info{comm="c",rank="1",exported_job="7"} 1\n'
STALL: Final = {
    "comm": "c",
    "rank": 1,
    "op": "AllReduce",
    "seconds": 31.0,
    "cause": "process_stopped",
    "blamed_rank": 1,
    "rail": None,
    "device": None,
    "evidence": ["rank 1 is stopped"],
}

Answer = Callable[[socketserver.StreamRequestHandler, str], None]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server at a port of its own that gives each request this answer; its URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            path = self.rfile.readline().decode().split()[1]
            # Who asks goes away when it likes.
            try:
                answer(self, path)
            except OSError:
                return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    with running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


def told(script: str, url: str, folder: Path) -> str:
    """What the script writes into the journal."""
    journal = folder / "journal"
    for program in ("logger", "systemctl"):
        (folder / program).write_text(f'#!/bin/sh\n[ {program} = logger ] || exit 0\nshift 5\necho "$@" >>{journal}\n')
        (folder / program).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "RAILSCOPE_URL": url, "SLURM_JOB_ID": "7"}
    command = [sys.executable, "-I", "-c", RUN, str(SLURM / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return journal.read_text() if journal.exists() else ""


def pages(stalls: bytes) -> Answer:
    def answer(to: socketserver.StreamRequestHandler, path: str) -> None:
        to.wfile.write(HEAD + (stalls if path == "/stalls" else METRICS))

    return answer


def drip(to: socketserver.StreamRequestHandler, path: str) -> None:
    """A byte now and then, for ever: no single read of it takes long."""
    del path
    to.wfile.write(b"HTTP/1.0 200 OK\r\n")
    while True:
        to.wfile.write(b"X")
        time.sleep(0.05)


def nothing_of_http(to: socketserver.StreamRequestHandler, path: str) -> None:
    del path
    to.wfile.write(b"* railscope\r\n\r\n")


def test_a_stall_of_the_job_is_a_line(tmp_path: Path) -> None:
    document = json.dumps({"stalls": [STALL, {**STALL, "comm": "another's"}], "ended": []}).encode()
    with answering(pages(document)) as url:
        assert told("epilog", url, tmp_path) == (
            "job 7: AllReduce of rank 1 stalled for 31 s, process_stopped, rank 1 is blamed: rank 1 is stopped\n"
        )


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(pages(b"[" * 100_000), id="nested without end"),
        pytest.param(pages(b'{"stalls": [7], "ended": []}'), id="another document"),
        pytest.param(pages(b"\xff\xfe"), id="no text"),
        pytest.param(nothing_of_http, id="no HTTP"),
        pytest.param(drip, id="a byte at a time"),
    ],
)
def test_the_epilog_says_that_it_knows_nothing_and_does_not_fail(answer: Answer, tmp_path: Path) -> None:
    with answering(answer) as url:
        lines = told("epilog", url, tmp_path).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("job 7: railscope says nothing of it: ")


def test_what_is_long_or_breaks_lines_is_one_short_line(tmp_path: Path) -> None:
    document = json.dumps({"stalls": [{**STALL, "evidence": ["x\njob 8: " + "y" * 300_000]}], "ended": []}).encode()
    with answering(pages(document)) as url:
        (line,) = told("epilog", url, tmp_path).splitlines()
    assert len(line) <= 500
    assert "x?job 8: y" in line


@pytest.mark.parametrize("answer", [nothing_of_http, drip])
def test_the_prolog_says_that_the_agent_is_not_ready_and_does_not_fail(answer: Answer, tmp_path: Path) -> None:
    with answering(answer) as url:
        (line,) = told("prolog", url, tmp_path).splitlines()
    assert line.startswith("job 7: railscope is not ready, and may miss the job's first calls: ")


def test_the_prolog_says_nothing_of_an_agent_that_is_ready_and_waits_for_one_that_says_why_not(tmp_path: Path) -> None:
    with answering(pages(b"")) as url:
        assert told("prolog", url, tmp_path) == ""

    def unready(to: socketserver.StreamRequestHandler, path: str) -> None:
        assert path == "/readyz"
        to.wfile.write(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")

    with answering(unready) as url:
        assert "HTTP Error 503" in told("prolog", url, tmp_path)
