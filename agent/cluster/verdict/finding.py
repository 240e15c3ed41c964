"""What `railscope diagnose` answers: findings, ready to be read, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass

from railscope.agent.cluster.fleet.stacks import RankStack
from railscope.agent.cluster.verdict.advice import Step


@dataclass(frozen=True, slots=True)
class Waiting:
    """A communicator that waits only because of another."""

    comm: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One root cause of stalls, or one rail that communicators go on without, ready to be read."""

    cause: str
    comm: str
    nranks: int | None
    op: str
    seconds: float | None
    strength: str
    basis: str
    ranks: tuple[str, ...]
    """The ranks blamed."""
    hosts: tuple[str, ...]
    """Where they, or the blamed rails, are."""
    world_ranks: tuple[str, ...]
    """Their ranks in the whole job; empty where it is not known."""
    pids: tuple[str, ...]
    rails: tuple[str, ...]
    devices: tuple[str, ...]
    headline: str
    evidence: tuple[str, ...]
    healthy: tuple[str, ...]
    waiting: tuple[Waiting, ...]
    next_steps: tuple[Step, ...]
    unknown: tuple[str, ...]
    """What cannot be known, and why."""
    stacks: tuple[RankStack, ...] = ()
    """Where the code of blamed ranks stands; only where that was asked for."""
    now: bool = True
    """False: no host calls it stalled at this moment; everything is as it was while one did, a moment ago."""
    times: int = 1
    """How often it was stalled within the window."""
    last: float | None = None
    """When a host called it stalled for the last time, seconds since the Unix epoch; None: now."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `railscope diagnose`."""

    at: float
    """Seconds since the Unix epoch, by the store's clock."""
    problem: bool
    """Something is stalled, or was a moment ago, or a rank is slow, or a communicator goes on without a port."""
    headline: str
    findings: tuple[Finding, ...]
    asked: tuple[str, ...] = ()
    """About the communicator asked for, where it is not stalled."""
    notes: tuple[str, ...] = ()
    """What limits every statement above, and what is odd elsewhere."""
    heard: bool = True
    """False: no host says anything at this moment, so that nothing being stalled is no answer."""
    answered: bool = True
    """False: the store left questions open, so that nothing being found is no answer."""
    unknown: tuple[str, ...] = ()
    """What cannot be known of processes that no finding is about, and how to find out."""
    clock: str = "by the store's clock"
    """By which `at` is meant."""
    ranks_seen: bool = True
    """False: ranks of jobs are among these, so that nothing being found is no answer."""
    job: tuple[str, ...] = ()
    """About the steps of the job that was asked for."""
