"""`railscope diagnose` on a real Prometheus of which one answer does not come: what is said, and with which status."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from tests.serving import QuietHandler
from tests.serving import running as serving
from tests.stack.fleet import SimulatedFleet, served
from tests.stack.prometheus import PATIENCE_SECONDS, prometheus, store_at, until

pytestmark = pytest.mark.stack

TIMEOUT_SECONDS = 12
OF_SLOW_RANKS = "railscope_comm_operation_seconds_total"
OF_RANKS = "railscope_comm_completed_total{"


class _Handler(QuietHandler):
    server: Busy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        (query,) = parse_qs(body.decode())["query"]
        if self.server.held and self.server.held in query:
            self.server.over.wait()
            return
        asked = urllib.request.Request(f"{self.server.store}{self.path}", body, dict(self.headers))
        with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as answer:
            self.answer(answer.status, answer.headers["Content-Type"], answer.read())


class Busy(ThreadingHTTPServer):
    """Passes questions on to a store, and keeps those waiting that hold some words."""

    daemon_threads = True

    def __init__(self, store: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store, self.held = store, ""
        self.over = threading.Event()


@dataclass
class Cluster:
    busy: Busy
    job: SimulatedFleet

    def diagnose(self, held: str = "") -> tuple[int, str, float]:
        """Exit status, what is printed in one line, seconds; questions with `held` in them have no answer."""
        self.busy.held = held
        began = time.monotonic()
        url = f"http://127.0.0.1:{self.busy.server_port}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "railscope.agent.cli.main", "diagnose"),
                *("--prometheus", url, "--timeout", f"{TIMEOUT_SECONDS}s"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=10 * TIMEOUT_SECONDS,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split()), time.monotonic() - began


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    job = SimulatedFleet("busy", 3)
    with served([job]) as scrapes, prometheus(tmp_path_factory.mktemp("prometheus"), scrapes) as url:
        store = store_at(url)
        until(lambda: len(store.query("railscope_build_info")) == job.hosts, "a scrape of every host")
        busy = Busy(url)
        with serving(busy):
            yield Cluster(busy, job)
            busy.over.set()


def test_a_question_that_is_not_answered_leaves_the_others_and_is_said(cluster: Cluster) -> None:
    until(lambda: cluster.diagnose()[0] == 0, "a healthy fleet")
    status, said, seconds = cluster.diagnose(OF_SLOW_RANKS)
    assert status == 2, said
    assert said.startswith(
        "Cannot tell whether anything is wrong, as the store did not answer everything: no host calls the only "
        "communicator stalled."
    )
    assert "not known: which ranks are slow (" in said
    assert f"did not answer within {TIMEOUT_SECONDS / 3:g} s" in said
    assert seconds >= TIMEOUT_SECONDS / 3


def test_a_stall_is_named_though_other_questions_are_not_answered(cluster: Cluster) -> None:
    cluster.job.stall(rank0="rank_behind", rank1="process_stopped;blamed_rank=1", rank2="rank_behind")
    until(lambda: cluster.diagnose()[0] == 1, "a stall")
    status, said, _ = cluster.diagnose(OF_SLOW_RANKS)
    assert (status, "rank 1 (pid 4001, busy1) is stopped" in said) == (1, True), said
    assert "not known: which ranks are slow" in said


def test_a_stall_whose_ranks_are_not_answered_blames_nobody(cluster: Cluster) -> None:
    status, said, _ = cluster.diagnose(OF_RANKS)
    assert status == 1
    assert said.startswith(
        f"STALLED: hosts call communicator {cluster.job.comm} stalled; what is to blame could not be asked. "
        f"- busy1 says process_stopped of rank 1 of {cluster.job.comm}"
    )


def test_a_store_that_answers_nothing_is_one_line_and_status_2(cluster: Cluster) -> None:
    status, said, seconds = cluster.diagnose("time()")
    assert status == 2
    assert said.startswith("railscope diagnose: http://127.0.0.1:")
    assert said.endswith("did not answer within 4 s: is it up, and reachable from here? If it is busy, give it more "
                         "with --timeout")  # fmt: skip
    assert seconds < 10 * TIMEOUT_SECONDS
