"""Beside a job of the real NCCL that runs alike the agent takes its time, and has none to lose where that ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [pytest.mark.nccl, pytest.mark.slow, pytest.mark.spins]

TIME, NO_TIME, STALLS = "one tick every 4 s", "one tick a second", " stalls in "


class Said:
    """What an agent logs, as it does; it is told more than it is asked, as each question ends the calm."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The pipe is the agent's harness's to close, which may not be while somebody reads from it.
        self._agent.process.send_signal(signal.SIGTERM)
        self._reader.join(60)

    def _read(self) -> None:
        assert self._agent.process.stderr is not None
        for line in self._agent.process.stderr:
            self._lines.append(line)

    @property
    def lines(self) -> int:
        return len(self._lines)

    def since(self, line: int, *, of: tuple[str, ...]) -> list[str]:
        """Which of these were said from that line on, in order."""
        return [what for said in self._lines[line:] for what in of if what in said]

    def text(self) -> str:
        return "".join(self._lines)


def test_a_rank_that_stops_is_named_at_once_and_ends_the_calm_and_so_does_who_asks_all_the_time(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, iterations=100_000_000, size_bytes=1 << 16, pace_us=2_000) as job:
        pids = job.ready()
        options = ("--level", "all", "--log.level", "debug", "--stall.floor", "1s", "--stall.after", "4s")
        with AgentProcess("--pid", *map(str, pids), *options) as agent, Said(agent) as said:
            job.start()
            agent.until(lambda: said.since(0, of=(TIME,)) != [])
            assert STALLS not in said.text()
            began = said.lines
            os.kill(pids[1], signal.SIGSTOP)
            try:
                agent.until(lambda: len(said.since(began, of=(STALLS,))) == 2)
            finally:
                os.kill(pids[1], signal.SIGCONT)
            # The kernel tells of the stop; who waits for it is found by looking, once a second by then.
            assert said.since(began, of=(NO_TIME, STALLS)) == [STALLS, NO_TIME, STALLS], said.text()
            assert "rank 1 of 2 stalls in AllReduce: process_stopped, blamed on rank 1" in said.text()
            began = said.lines
            agent.until(lambda: said.since(began, of=(TIME,)) != [])
            # The calm is back; one client that asks without a pause ends it, too.
            began = said.lines

            def asked() -> bool:
                agent.text()
                return said.since(began, of=(NO_TIME,)) != []

            agent.until(asked)
            assert "one tick a second: a client scrapes repeatedly" in said.text()
