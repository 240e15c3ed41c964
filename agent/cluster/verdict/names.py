"""Ranks, hosts and rails as the verdict names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from railscope.agent.cluster.fleet.facts import Rail, Rank
from railscope.agent.cluster.verdict.quantities import format_rank_numbers
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import rail_name


def name_communicator(comm: str) -> str:
    """`communicator 00c0ffee00c0ffee`, or whose it is where its host does not know which."""
    return "a process of no known communicator" if comm == UNKNOWN else f"communicator {comm}"


def name_end(comm: str, rank: str) -> str:
    """`rank 3 of 00c0ffee00c0ffee`, as far as it is known."""
    return name_communicator(comm) if comm == UNKNOWN else f"rank {rank} of {comm}"


def format_ranks(ranks: Sequence[Rank]) -> str:
    """Ranks of a verdict with their hosts; empty where there are none."""
    return " and ".join(_rank_text(rank) for rank in ranks) if len(ranks) < 3 else format_ranks_and_hosts(ranks)


def format_last_hosts(ranks: Iterable[Rank]) -> str:
    """In brackets, the last hosts of ranks that no agent reports; empty: unknown."""
    hosts = dict.fromkeys(rank.host for rank in ranks if rank.host)
    return f" (last seen on {format_hosts(hosts)})" if hosts else ""


def _rank_text(rank: Rank) -> str:
    # Logs of the job number its ranks through; a communicator of some of them has numbers of its own.
    of_job = f"rank {rank.world_rank} of the job" if rank.world_rank not in ("", rank.rank) else ""
    pid, user = rank.identity.pid, rank.identity.of_job("user")
    process = f"pid {pid}" if pid else ""
    if process and user:
        process += f" of {user}"
    known = ", ".join(word for word in (of_job, process, rank.host) if word)
    name = f"rank {rank.rank}"
    if rank.rank == UNKNOWN:
        name = "a process" if rank.comm == UNKNOWN else "a rank whose number is not known"
    return f"{name} ({known})" if known else name


def format_ranks_and_hosts(ranks: Sequence[Rank]) -> str:
    """Ranks of a verdict, and their hosts in brackets: `ranks 1-3 (on host0, host1)`."""
    hosts = dict.fromkeys(rank.host for rank in ranks if rank.host)
    return f"{format_rank_numbers(rank.rank for rank in ranks)} (on {format_hosts(hosts)})"


def format_hosts(hosts: Iterable[str], most: int = 3) -> str:
    """Hosts of a verdict: `host0, host1, host2, …`."""
    names = list(hosts)
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def format_rail(rail: Rail) -> str:
    """A rail of a verdict: `rail 0 (eth0) of host1`."""
    return f"{rail_name(rail.rail, rail.device, rail.netns)} of {rail.host}"


WHICH_END: Final = "; at which end, or where between them, is not known"
"""Said of what `format_rail_between` names."""


def format_rail_between(ends: Sequence[Rail]) -> str:
    """One rail of several hosts, its ends: `rail 0 between host0 (eth0) and host1 (eth0)`."""
    names = [rail_end(rail) for rail in ends]
    number = f"rail {ends[0].rail}" if ends[0].rail else "the rail"
    if len(names) < 3:
        return f"{number} between {' and '.join(names)}"
    return f"{number} between {format_hosts(names)}"


def rail_end(rail: Rail) -> str:
    """A host with its end of a rail: `host0 (eth0)`, or without a device the host alone."""
    device = f"{rail.device} in {rail.netns}" if rail.device and rail.netns else rail.device
    return f"{rail.host} ({device})" if device else rail.host
