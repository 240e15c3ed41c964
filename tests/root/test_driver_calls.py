"""Calls of CUDA's driver in the kernel's tables: counted by process, and there by thread from entry to return.

The driver is a few instructions in a library, loaded by a process that makes the calls that a test tells it to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.functions.cuda import cuda_points
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.driver_calls import DriverCalls
from railscope.probes.nccl.records.driver_calls import PROCESS, DriverKind, DriverStat
from tests.root.caller import Caller
from tests.root.cuda_job import MODES, SESSION
from tests.root.probe_targets import assemble, on_x86_64
from tests.waiting import eventually

pytestmark = [pytest.mark.root, on_x86_64]

GREEDY, MODEST = 5000, 5001
SPIN = "1: pause; cmpq $0, (%rdi); je 1b"
"""Until the first argument points to something else than 0."""
RETURN = "pop %rbp; xor %eax, %eax; ret"
DRIVER = {
    "cuEventQuery": f"push %rbp; {RETURN}",
    "cuGraphLaunch": f"push %rbp; {RETURN}",
    "cuGraphLaunch_ptsz": f"push %rbp; {RETURN}",
    "cuStreamSynchronize": f"push %rbp; {SPIN}; {RETURN}",
    "cuEventSynchronize": f"push %rbp; {RETURN}",
    # It makes another such call, which returns, and goes on.
    "cuCtxSynchronize": f"push %rbp; call cuEventSynchronize@PLT; {SPIN}; {RETURN}",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assemble(tmp_path_factory.mktemp("driver"), **DRIVER)


@dataclass(frozen=True, slots=True)
class Followed:
    programs: NcclPrograms
    calls: DriverCalls

    def counts(self, pid: int) -> dict[str, int]:
        pids, processes = self.calls.processes()
        (at,) = [at for at, one in enumerate(pids.tolist()) if one == pid]
        return {name: int(processes[name][at]) for name in PROCESS.names or ()}

    def inside(self) -> list[tuple[int, DriverKind]]:
        """Processes with a thread inside a call, and which call."""
        _, threads = self.calls.threads()
        return [(int(one["tgid"]), DriverKind(int(one["kind"]))) for one in threads if one["start_ns"]]

    def known(self) -> list[int]:
        """Processes of the threads that have an entry."""
        tgids: list[int] = self.calls.threads()[1]["tgid"].tolist()
        return tgids


@contextmanager
def followed(
    driver: Path, *pids: int, attach: AttachKind = AttachKind.MULTI, enqueue_time: EnqueueTime | None = None,
    most_threads: int = 4096,
) -> Iterator[Followed]:  # fmt: skip
    with driver.open("rb") as file, Elf.open(file.fileno()) as elf:
        points = cuda_points(elf)
    assert points is not None
    with ExitStack() as stack:
        programs = NcclPrograms.load(ProgramSettings(attach=attach, enqueue_time=enqueue_time))
        stack.callback(programs.close)
        calls = DriverCalls.load(programs, most_threads=most_threads)
        stack.callback(calls.close)
        for pid in pids:
            calls.follow(pid)
        stack.callback(calls.attach(str(driver), points.followed).close)
        yield Followed(programs, calls)


def enter(caller: Caller, name: str, inside: Callable[[], list[tuple[int, DriverKind]]]) -> Callable[[], None]:
    """A thread goes into a call and stays; what is returned lets it return."""
    address = caller.memory(4096)
    caller.start(name, address)
    eventually(lambda: caller.pid in [pid for pid, _ in inside()])

    def leave() -> None:
        caller.store(address, 1, 8)
        caller.finish()

    return leave


@pytest.mark.parametrize("mode", MODES)
def test_a_call_is_there_from_its_entry_to_its_return(driver: Path, mode: tuple[AttachKind, EnqueueTime]) -> None:
    with Caller(driver) as caller, followed(driver, caller.pid, attach=mode[0], enqueue_time=mode[1]) as seen:
        caller.call("cuGraphLaunch", 5, 0)
        caller.call("cuGraphLaunch_ptsz", 2, 0)
        caller.call("cuEventSynchronize", 3, 0)
        before = seen.counts(caller.pid)
        leave = enter(caller, "cuStreamSynchronize", seen.inside)
        during, inside = seen.counts(caller.pid), seen.inside()
        leave()
        after = seen.counts(caller.pid)
        assert seen.inside() == []
        stats = seen.calls.stats()
    assert [before[name] for name in ("launches", "launched", "waits", "waited")] == [7, 7, 3, 3]
    assert (during["waits"], during["waited"]) == (4, 3)
    assert inside == [(caller.pid, DriverKind.STREAM_SYNC)]
    assert (after["waits"], after["waited"]) == (4, 4)
    assert after["longest_ns"] > before["longest_ns"] > 0
    assert after["last_return_ns"] > before["last_return_ns"] > 0
    assert (stats[DriverStat.ENTRIES], stats[DriverStat.RETURNS], stats[DriverStat.FULL]) == (11, 11, 0)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_call_calls_in_turn_is_part_of_it(driver: Path, mode: tuple[AttachKind, EnqueueTime]) -> None:
    with Caller(driver) as caller, followed(driver, caller.pid, attach=mode[0], enqueue_time=mode[1]) as seen:
        leave = enter(caller, "cuCtxSynchronize", seen.inside)
        inside = seen.inside()
        leave()
        counts = seen.counts(caller.pid)
    assert inside == [(caller.pid, DriverKind.CONTEXT_SYNC)]
    assert (counts["waits"], counts["waited"]) == (1, 1)


def test_whoever_is_not_followed_leaves_no_trace(driver: Path) -> None:
    with Caller(driver) as one, Caller(driver) as other, followed(driver, one.pid) as seen:
        other.call("cuGraphLaunch", 4, 0)
        other.call("cuEventSynchronize", 4, 0)
        assert seen.known() == []
        assert seen.calls.stats()[DriverStat.ENTRIES] == 0
        seen.calls.follow(other.pid)
        other.call("cuGraphLaunch", 4, 0)
        assert seen.counts(other.pid)["launches"] == 4
        seen.calls.forget([other.pid])
        assert seen.known() == []
        assert seen.calls.processes()[0].tolist() == [one.pid]


def test_a_user_with_many_threads_leaves_room_for_another_and_gets_back_what_is_taken_out(driver: Path) -> None:
    entries = 24
    with (
        Caller(driver, user=GREEDY) as one,
        Caller(driver, user=MODEST) as other,
        followed(driver, one.pid, other.pid, attach=SESSION[0], enqueue_time=SESSION[1], most_threads=entries) as seen,
    ):
        one.call_from_threads("cuEventSynchronize", 40, 1, 0)
        assert seen.known() == [one.pid] * (entries // 3)
        assert seen.counts(one.pid)["waited"] == 40, "what has no entry is counted all the same"
        other.call_from_threads("cuEventSynchronize", 3, 1, 0)
        assert seen.known().count(other.pid) == 3
        assert seen.programs.shares.refused() == {("driver_threads", GREEDY): 40 - entries // 3}
        tids, threads = seen.calls.threads()
        seen.calls.drop(zip(tids.tolist(), threads["last_ns"].tolist(), strict=True))
        assert seen.known() == []
        one.call_from_threads("cuEventSynchronize", 40, 1, 0)
        assert seen.known() == [one.pid] * (entries // 3)


def test_a_thread_that_has_made_a_call_since_it_was_read_stays(driver: Path) -> None:
    with Caller(driver) as caller, followed(driver, caller.pid) as seen:
        caller.call("cuEventSynchronize", 1, 0)
        tids, threads = seen.calls.threads()
        read = list(zip(tids.tolist(), threads["last_ns"].tolist(), strict=True))
        caller.call("cuEventSynchronize", 1, 0)
        seen.calls.drop(read)
        assert seen.known() == [caller.pid]
