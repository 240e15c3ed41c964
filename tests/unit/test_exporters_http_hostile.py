"""Scrapes and health beside thousands of hostile clients.  Server and attackers are processes of their own."""

from __future__ import annotations

import base64
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import bcrypt
import pytest

from railscope.dashboards.typical_node import COMMUNICATORS_OF_A_GPU, GPUS
from tests.unit.hostile_server import Told

_COMMUNICATORS: Final = GPUS * COMMUNICATORS_OF_A_GPU
_RIGHT: Final = "Basic " + base64.b64encode(b"ada:correct horse").decode()
_SCRAPE_SECONDS: Final = 1.0
_HEALTH_SECONDS: Final = 0.2
_WORK_SECONDS: Final = 0.02
_MOST_GROWTH_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Victim:
    """A server, and how it is asked."""

    process: subprocess.Popen[str]
    port: int
    authorization: str = ""

    def told(self) -> Told:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return Told(**json.loads(self.process.stdout.readline()))

    def seconds(self, path: str) -> float:
        """How long an answer took, on a connection of its own; no answer, and one that is not good, is an error."""
        headers = {"Accept-Encoding": "gzip"} | ({"Authorization": self.authorization} if self.authorization else {})
        before = time.monotonic()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as client:
            client.request("GET", path, headers=headers)
            answer = client.getresponse()
            answer.read()
        assert answer.status == 200
        return time.monotonic() - before


@contextmanager
def running(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python process that has printed its first line; it ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


@contextmanager
def served(web: Path | None = None) -> Iterator[Victim]:
    with running("tests.unit.hostile_server", str(_COMMUNICATORS), *([str(web)] if web else [])) as (process, line):
        yield Victim(process, int(line), _RIGHT if web else "")


@contextmanager
def attacked(victim: Victim, **crowds: int) -> Iterator[None]:
    """With so many clients of each kind (hostile_clients.py)."""
    with ExitStack() as attackers:
        for kind, count in crowds.items():
            arguments = (str(victim.port), str(count), kind.replace("_", "-"))
            _, line = attackers.enter_context(running("tests.unit.hostile_clients", *arguments))
            assert line == "there\n"
        yield


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    web = tmp_path / "web.yml"
    hashed = bcrypt.hashpw(b"correct horse", bcrypt.gensalt(10)).decode()
    web.write_text(f"basic_auth_users: {{ada: {hashed}}}\n")
    return web


def slack() -> float:
    """By how much longer answers may take: attackers may take one of two processors, others of this machine none."""
    began, own = time.monotonic(), time.thread_time()
    while time.thread_time() - own < _WORK_SECONDS:
        pass
    return max(1.0, (time.monotonic() - began) / _WORK_SECONDS / 2)


def scrape_ten_times(victim: Victim) -> None:
    scrapes, healths, slacks = [], [], []
    for _ in range(10):
        scrapes.append(victim.seconds("/metrics"))
        healths.append(victim.seconds("/healthz"))
        slacks.append(slack())
        time.sleep(0.05)
    # Each was answered; in one of them this process may have waited for a processor, which the attackers want as well.
    assert sorted(scrapes)[-2] < _SCRAPE_SECONDS * statistics.median(slacks), (scrapes, slacks)
    assert statistics.median(healths) < _HEALTH_SECONDS * statistics.median(slacks), (healths, slacks)


def test_ten_of_ten_scrapes_beside_half_open_and_unread_clients_and_wrong_passwords() -> None:
    with served() as victim:
        victim.seconds("/metrics")
        before = victim.told()
        with attacked(victim, half_open=1000, unread=1000, eve=24):
            scrape_ten_times(victim)
            during = victim.told()
        assert during.descriptors - before.descriptors <= 512 + 16
        assert during.threads == before.threads
        assert during.resident_bytes - before.resident_bytes < _MOST_GROWTH_BYTES
        assert during.refusals["half_open"] > 1000
        # One of each kind of refusal a minute; a minute may end meanwhile.
        assert during.log_lines <= 2 * len(during.refusals)
        deadline = time.monotonic() + 20
        while (after := victim.told()).descriptors > before.descriptors:
            assert time.monotonic() < deadline, after
            time.sleep(0.1)


def test_ten_of_ten_scrapes_with_a_password_beside_the_same(passwords: Path) -> None:
    with served(passwords) as victim, attacked(victim, half_open=1000, unread=1000, eve=24):
        scrape_ten_times(victim)
        assert victim.told().threads <= 4


def test_a_first_right_password_beside_those_who_guess_another_of_the_same_user(passwords: Path) -> None:
    with served(passwords) as victim, attacked(victim, ada=24):
        seconds = victim.seconds("/metrics")
        assert seconds < _SCRAPE_SECONDS * statistics.median(slack() for _ in range(5))
        healths, slacks = zip(*((victim.seconds("/healthz"), slack()) for _ in range(5)), strict=True)
        assert statistics.median(healths) < _HEALTH_SECONDS * statistics.median(slacks)


def test_a_thousand_who_say_nothing_keep_nobody_out() -> None:
    with served() as victim, attacked(victim, idle=1000):
        scrape_ten_times(victim)
