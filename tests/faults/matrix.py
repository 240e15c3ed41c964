"""The scenarios of the matrix, and those few that `make test` runs.

Every fault stands here for two hosts on both libraries, and the most telling ones for four.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from railscope.agent.cli.demo import gpt_shape
from railscope.testbed.job import Instead, Moments, SkippedCall, SlowSteps, Writer
from tests.faults.scenarios import (
    AFTER_SECONDS,
    CRAWL_MBIT,
    LINE_MBIT,
    NEVER_MS,
    PACE_SECONDS,
    Expected,
    Kind,
    Library,
    Load,
    Scenario,
    control,
    even_pace,
    fault,
    long_checkpoint,
)

_BOTH: Final = (Library.WORKLOAD, Library.NCCL)
_FLAG_ALLOWED: Final = Expected(frozenset(), flag_allowed=True)
_HEALTHY_PACE_US: Final = 20_000
_IN_TIME_MS: Final = 4000
"""Less than a call may take."""
_SEVERAL: Final = Load(shape=gpt_shape(4), ranks_per_host=2)
"""Two stages of two ranks: each rank has a communicator with its stage, one with its like in the other, and more."""


def _several(kind: Kind, load: Load = _SEVERAL, warm_seconds: float = 3) -> Scenario:
    """Long enough that whoever only waits has said so."""
    return fault(
        kind,
        Library.WORKLOAD,
        2,
        f"{kind.value}, several communicators",
        loads=(load,),
        warm_seconds=warm_seconds,
        fault_seconds=AFTER_SECONDS + 3,
        full_length=True,
    )


def _faults(library: Library, hosts: int) -> tuple[Scenario, ...]:
    """Every fault once."""
    skip = Load(skip=SkippedCall(hosts - 1, 150))
    replaced = Load(skip=SkippedCall(hosts - 1, 150, Instead.REPLACE))
    two = (Load(), Load(pace_us=_HEALTHY_PACE_US))
    return (
        fault(Kind.STOP, library, hosts),
        fault(Kind.KILL, library, hosts),
        fault(Kind.LINK_DOWN, library, hosts, "link down 10 s", fault_seconds=10, full_length=True),
        fault(Kind.SLOW, library, hosts),
        fault(Kind.SLOW_IN_SWITCH, library, hosts),
        fault(Kind.FILTER, library, hosts),
        fault(Kind.FILTER_IN_SWITCH, library, hosts),
        fault(Kind.STARVE, library, hosts, fault_seconds=30),
        fault(Kind.SKIP, library, hosts, loads=(skip,), warm_seconds=2, fault_seconds=30),
        fault(Kind.REPLACE, library, hosts, loads=(replaced,), warm_seconds=2, fault_seconds=30),
        fault(Kind.FREEZE, library, hosts),
        fault(Kind.LARGE_DROPPED, library, hosts),
        fault(Kind.STOP, library, hosts, "two jobs, one stopped", loads=two),
        fault(Kind.STOP, library, hosts, "SIGSTOP, agent restarted", restart_agent=True),
        fault(Kind.STOP, library, hosts, "SIGSTOP, host unscraped", hide_host=True),
    )


def _brief(library: Library, hosts: int = 2) -> tuple[Scenario, ...]:
    """Links that come back before anybody must have noticed."""
    brief = fault(Kind.LINK_DOWN, library, hosts)
    return tuple(
        replace(
            brief,
            name=f"link down {seconds:g} s",
            expected=_FLAG_ALLOWED,
            fault_seconds=seconds,
            full_length=True,
        )
        for seconds in (0.1, 1.0)
    )


def _controls(library: Library) -> tuple[Scenario, ...]:
    """What is never called a stall, on either library."""
    crawl = Load(size_bytes=32 << 20, pace_us=0)
    end = Load(iterations=150)
    return (
        control("idle after work", library, loads=(Load(pause=Moments(60, 600_000)),), fault_seconds=12),
        control("compute phases", library, loads=(Load(pause=Moments(40, 9000)),), fault_seconds=16),
        long_checkpoint("checkpoint, 2 ranks a host", library, Load(ranks_per_host=2)),
        long_checkpoint("checkpoint, 1 rank a host", library, Load()),
        *(long_checkpoint(f"checkpoint {words}", library, Load(checkpoint_by=writer, ranks_per_host=ranks))
          for writer, words, ranks in ((Writer.CHILD, "by a child process", 1), (Writer.UPLOAD, "to a server", 2),
                                       (Writer.MEMORY, "to /dev/shm", 1))),
        control("short checkpoints", library, loads=(Load(checkpoint=Moments(40, 4000), ranks_per_host=2),),
                fault_seconds=12),
        control("warm-up", library, loads=(Load(warm_up_ms=4000),), warm_seconds=0.5, fault_seconds=8),
        control("job end", library, loads=(end,), warm_seconds=1, fault_seconds=4),
        control("job end without destroy", library, loads=(replace(end, destroy=False),), warm_seconds=1,
                fault_seconds=4),
        control("slow ring on all rails", library, loads=(crawl,), line_mbit=CRAWL_MBIT, fault_seconds=14),
        control("small collectives", library, loads=(Load(size_bytes=1024, pace_us=5000),), fault_seconds=8),
        control("one rank leaves, all live on", library,
                loads=(Load(skip=SkippedCall(0, 60, Instead.LEAVE)),), warm_seconds=1, fault_seconds=14),
        control("whole job killed", library, kind=Kind.KILL_ALL, loads=(Load(ranks_per_host=2),), fault_seconds=10),
        control("foreign traffic", library, kind=Kind.FOREIGN, line_mbit=LINE_MBIT, fault_seconds=8),
    )  # fmt: skip


def _paces(library: Library) -> tuple[Scenario, ...]:
    """A rank that is slower than the others in each step, a rail that is slower than its siblings, and jobs without.

    Of the workload library calls are all that is seen, so that only ranks of one host are compared.
    """
    job = Load(ranks_per_host=2 if library is Library.WORKLOAD else 1)
    full = Load(size_bytes=8 << 20)
    slow = job.ranks_per_host
    """The first rank of the last host."""
    return (
        fault(Kind.SLOW_RANK, library, 2, loads=(replace(job, slow=SlowSteps(400, slow)),), warm_seconds=1,
              fault_seconds=PACE_SECONDS),
        even_pace("every rank equally slow", library, replace(job, pace_us=430_000)),
        even_pace("a rank slow in one step", library, replace(job, slow=SlowSteps(1500, slow, every=500))),
        even_pace("ranks slow in turn", library, replace(job, slow=SlowSteps(400, None))),
        # What was said of a rail before is over when the next one becomes slow.
        *(fault(kind, library, 2, loads=(full,), rail=rail, line_mbit=LINE_MBIT, warm_seconds=30,
                fault_seconds=PACE_SECONDS)
          for kind, rail in ((Kind.AT_30_PERCENT, 1), (Kind.AT_60_PERCENT, 0), (Kind.LOSS, 1))),
        replace(even_pace("all rails at 60 %", library, full, 6 * LINE_MBIT // 10), warm_seconds=30),
    )  # fmt: skip


_GRAPHS: Final = control("graph replays", Library.NCCL, loads=(Load(pattern="graph"),), fault_seconds=10)
_GRAPH_AND_LIVE: Final = control(
    "graph replays beside calls", Library.NCCL, loads=(Load(pattern="graph-and-live"),), fault_seconds=10
)
_LAST_IN_FOUR: Final = ("SIGSTOP", "SIGKILL", "link down 10 s", "rail at 10 %", "nft drop", "skipped collective")


def _calls(library: Library) -> tuple[Scenario, ...]:
    """Calls that do not return, and their like that do."""
    faults = [fault(Kind.NO_PEER, library, hosts, loads=(Load(late_ms=NEVER_MS),)) for hosts in (2, 4)]
    twins = [control("slow init", library, loads=(Load(late_ms=_IN_TIME_MS),), warm_seconds=1, fault_seconds=4)]
    if library is Library.NCCL:
        split = Load(pattern="split-late", warm_up_ms=NEVER_MS)
        differs = Load(size_bytes=1 << 14, pattern="disagree-operation", iterations=300, hold=True, late_ms=1)
        faults = [
            *faults[:1],  # the ranks of four hosts starve each other on a small machine: their proxies spin
            fault(Kind.NO_SPLIT, library, 2, loads=(split,)),
            fault(Kind.RECEIVES, library, 2, loads=(Load(pattern="receive-first"),)),
            # Ranks of the workload library whose calls fail are in no operation any more, and nobody tells of them.
            fault(Kind.KILL_HOST, library, 2, loads=(Load(ranks_per_host=2),)),
            # The agents are there before the communicator: ranks that were seen late are not compared across hosts.
            fault(Kind.DISAGREE, library, 2, loads=(differs,), warm_seconds=1, fault_seconds=30),
            fault(Kind.CIRCLE, library, 2, loads=(Load(pattern="sendrecv", skip=SkippedCall(1, 60, Instead.RECEIVE)),)),
        ]
        twins += [
            control("slow split", library, loads=(replace(split, warm_up_ms=_IN_TIME_MS),), warm_seconds=1,
                    fault_seconds=8),
            control("sends and receives in a group", library, loads=(Load(pattern="sendrecv"),), warm_seconds=1,
                    fault_seconds=8),
        ]  # fmt: skip
    return (*faults, *twins)


MATRIX: Final = (
    *(scenario for library in _BOTH for scenario in (*_faults(library, 2), *_brief(library), *_controls(library))),
    *(scenario for library in _BOTH for scenario in _faults(library, 4) if scenario.name in _LAST_IN_FOUR),
    *(scenario for library in _BOTH for scenario in _calls(library)),
    *(scenario for library in _BOTH for scenario in _paces(library)),
    _GRAPHS,
    _GRAPH_AND_LIVE,
    _several(Kind.STOP),
    _several(Kind.KILL),
    _several(Kind.SKIP, replace(_SEVERAL, skip=SkippedCall(2, 80)), warm_seconds=2),
    control(
        "compute phases, several communicators",
        Library.WORKLOAD,
        loads=(replace(_SEVERAL, pause=Moments(20, 9000)),),
        fault_seconds=16,
    ),
)

SHORT: Final = (
    fault(Kind.STOP, Library.NCCL, 2, warm_seconds=3),
    replace(fault(Kind.LINK_DOWN, Library.WORKLOAD, 2, warm_seconds=3), fault_seconds=6),
    fault(Kind.SLOW, Library.WORKLOAD, 2, warm_seconds=6),
    _several(Kind.STOP),
    fault(Kind.NO_PEER, Library.WORKLOAD, 2, loads=(Load(late_ms=NEVER_MS),)),
    control("compute phases", Library.WORKLOAD, loads=(Load(pause=Moments(20, 7000)),), warm_seconds=1,
            fault_seconds=10),
)  # fmt: skip
"""What `make test` runs, in a little more than a minute."""
