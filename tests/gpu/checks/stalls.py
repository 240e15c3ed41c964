"""What is said of a job that stands: cause, rank and delay, for faults that only a real GPU has, too."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.fabric.agent_process import AgentProcess
from tests.gpu.lane import Lane
from tests.gpu.rails import two_hosts
from tests.gpu.ranks import Ranks, RanksError
from tests.gpu.table import Verdict

LIMITS: Final = ("--stall.floor", "1s", "--stall.after", "4s")
_MOST_SECONDS: Final = 10.0
_FAULT_SECONDS: Final = 8.0
_ENVIRONMENT: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Else PyTorch's watchdog ends a process whose communicator was aborted."""
_HISTORY_SECONDS: Final = 4
_CALLS_A_SECOND: Final = 20
_PAYLOAD_BYTES: Final = 1 << 14
"""Of every operation: what is usual is known by operation and size."""
BLAMED: Final = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that holds the job up."""

    name: str
    cause: str
    begin: Callable[[Ranks], None]
    end: Callable[[Ranks], None]


def _stop(ranks: Ranks) -> None:
    ranks.signal(BLAMED, signal.SIGSTOP)
    ranks.tell("timed", operation="AllReduce", payload_bytes=_PAYLOAD_BYTES, times=1)


def _go_on(ranks: Ranks) -> None:
    ranks.signal(BLAMED, signal.SIGCONT)
    ranks.answers(30)


FAULTS: Final = (
    Fault("a rank that is stopped", "process_stopped", _stop, _go_on),
    Fault(
        "a rank in an endless loop on its host",
        "rank_behind",
        lambda ranks: ranks.tell("idle_on_host", rank=BLAMED, seconds=_FAULT_SECONDS),
        lambda ranks: _answered(ranks),
    ),
    Fault(
        "a kernel that spins on the stream of the collectives",
        "gpu_not_progressing",
        lambda ranks: ranks.tell("occupy", rank=BLAMED, seconds=_FAULT_SECONDS),
        lambda ranks: _answered(ranks),
    ),
)


def run(lane: Lane) -> None:
    with two_hosts() as two, lane.ranks(two, environment=_ENVIRONMENT) as ranks:
        with lane.agent("all", "--level", "all", *LIMITS, *ranks.pid_options) as agent:
            ranks.join()
            for _ in range(_HISTORY_SECONDS):
                ranks.ask("timed", operation="AllReduce", payload_bytes=_PAYLOAD_BYTES, times=_CALLS_A_SECOND)
                time.sleep(1.0)
            agent.until(lambda: bool(agent.samples("railscope_comm_info", nranks="2")), 10)
            lane.rows.compared("stalls said before any fault", len(agent.stalls()), 0)
            for fault in FAULTS[: 1 if lane.short else None]:
                with lane.attempt(fault.name):
                    _try(lane, agent, ranks, fault)
            with lane.attempt("abort"):
                _abort(lane, agent, ranks)
            lane.keep_metrics(agent)


def _answered(ranks: Ranks) -> None:
    ranks.answers(30)


def _try(lane: Lane, agent: AgentProcess, ranks: Ranks, fault: Fault) -> None:
    began = time.monotonic()
    fault.begin(ranks)
    first: float | None = None
    said: set[tuple[str, int | None]] = set()
    while (fault.cause, BLAMED) not in said and time.monotonic() < began + _MOST_SECONDS:
        time.sleep(0.05)
        said |= {(str(stall["cause"]), stall["blamed_rank"]) for stall in agent.stalls()}
        if said and first is None:
            first = time.monotonic() - began
    delay = time.monotonic() - began
    (lane.folder / f"stalls-{fault.cause}.json").write_text(agent.page("/stalls"))
    fault.end(ranks)
    named = (fault.cause, BLAMED) in said and not any(rank not in (BLAMED, None) for _, rank in said)
    text = ", ".join(f"{cause}{'' if rank is None else f' of rank {rank}'}" for cause, rank in sorted(said, key=str))
    when = "" if first is None else f"; first after {first:.1f} s" + (f", this after {delay:.1f} s" if named else "")
    lane.rows.add(
        fault.name,
        f"{text or 'nothing'}{when}",
        wanted=f"{fault.cause} of rank {BLAMED}",
        verdict=Verdict.OK if named else Verdict.DIFFERS,
        value=delay if named else None,
    )
    _cleared(lane, agent, fault.name)


def _cleared(lane: Lane, agent: AgentProcess, name: str) -> None:
    if not agent.comes_true(lambda: not agent.stalls(), 6):
        lane.rows.add(f"{name}: over", "still said 6 s later", wanted="cleared", verdict=Verdict.DIFFERS)


def _abort(lane: Lane, agent: AgentProcess, ranks: Ranks) -> None:
    """Rank 0 waits for an operation that nobody joins, and both abort."""
    try:
        ranks.ask("abort", within_seconds=30)
    except RanksError as error:
        lane.rows.add("abort", str(error), verdict=Verdict.FAILED)
        return
    agent.comes_true(lambda: _aborts(agent) >= 2, 5)
    lane.rows.compared("communicators aborted", _aborts(agent), 2.0)
    time.sleep(1.5)
    lane.rows.compared("stalls said of an aborted communicator", len(agent.stalls()), 0)


def _aborts(agent: AgentProcess) -> float:
    return sum(value for _, value in agent.samples("railscope_comm_events_total", event="abort"))
