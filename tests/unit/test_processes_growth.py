"""What a scan, a tick, a snapshot and the end cost as a host's processes grow: never more than in proportion.

The processes are folders that look like /proc, each with a library and a communicator with a call on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.growth import MOST_EXPONENT, exponent, lines_run
from tests.unit.test_observer_processes import Host, host_with


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each process that begins to use NCCL has a line in the log."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def scan(host: Host) -> None:
    host.observer.scan()


def scan_all_one_by_one(host: Host) -> None:
    host.observer.scan_processes({identity.pid for identity in host.new})


def tick(host: Host) -> None:
    host.observer.update()
    host.observer.evaluate_stalls()


def snapshot(host: Host) -> None:
    host.observer.snapshot()
    host.observer.rank_processes()


def end_all(host: Host) -> None:
    host.observer.processes_gone(dict.fromkeys(host.new, 9))
    host.observer.update()


@pytest.mark.parametrize(("few", "many"), [(1, 16), (16, 128), (128, 512)])
@pytest.mark.parametrize("act", [scan, scan_all_one_by_one, tick, snapshot, end_all])
def test_all_that_is_done_for_processes_grows_as_there_are_of_them(
    act: Callable[[Host], None], tmp_path: Path, few: int, many: int
) -> None:
    def work(processes: int) -> int:
        folder = tmp_path / str(processes)
        folder.mkdir()
        with host_with(folder) as host:
            library = host.library("2.90.1")
            for pid in range(1000, 1000 + processes):
                host.runs(pid, library)
                host.uses_nccl(pid, pid)
            tick(host)
            return lines_run(lambda: act(host))

    assert exponent(work, few, many) <= MOST_EXPONENT


def test_the_first_scan_grows_as_the_processes(tmp_path: Path) -> None:
    def work(processes: int) -> int:
        folder = tmp_path / str(processes)
        folder.mkdir()
        with host_with(folder) as host:
            library = host.library("2.90.1")
            for pid in range(1000, 1000 + processes):
                host.runs(pid, library)
            return lines_run(host.observer.scan)

    assert exponent(work, 64, 512) <= MOST_EXPONENT
