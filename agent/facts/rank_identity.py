"""Who one rank's end of one communicator is: the one record, which all other facts of a rank hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from railscope.agent.facts.label_numbers import UNKNOWN, parse_number

Labels = tuple[tuple[str, str], ...]
"""Label names and values in the order in which they are shown."""
RankKey = tuple[str, str]
"""Communicator and rank: what series of a rank's numbers carry."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The identity of one rank's end of one communicator: the one record, which all other facts of a rank hold.

    Fields have the names of `comm_info`'s labels; a number is text, as a label is.
    """

    comm: str
    """NCCL's commHash as 16 hex digits."""
    rank: str
    nranks: str
    gpu: str
    node_rank: str
    """Index of this node within the communicator."""
    local_ranks: str
    """Ranks of this communicator on this node."""
    nccl_version: str
    pid: int
    """0: not known."""
    netns: str
    """Label of the network namespace; empty: the agent's own, or not known."""
    job: Labels
    """Facts of the job (`job`, `pod`, `namespace`, `world_rank`, …) as label pairs."""
    identity_source: str
    """How the identity was read: `layout` (struct fields), `init` (arguments of the init call), `unknown`."""

    @property
    def key(self) -> RankKey:
        """What series of the rank's numbers carry."""
        return self.comm, self.rank

    def of_job(self, fact: str) -> str:
        """A fact of the job, as `world_rank`; empty: not known."""
        return dict(self.job).get(fact, "")

    @property
    def job_name(self) -> str:
        """What the job is called, or else its pod; empty: not known."""
        return self.of_job("job") or self.of_job("pod")

    @property
    def process(self) -> str:
        """The pid as text."""
        return str(self.pid or UNKNOWN)


def rank_identity_from_labels(comm: str, rank: str, info: Mapping[str, str], job: Labels) -> RankIdentity:
    """The identity of a rank that labels of `comm_info` tell; without them only its communicator and rank are known."""
    return RankIdentity(
        comm=comm,
        rank=rank,
        nranks=info.get("nranks", UNKNOWN),
        gpu=info.get("gpu", UNKNOWN),
        node_rank=info.get("node_rank", UNKNOWN),
        local_ranks=info.get("local_ranks", UNKNOWN),
        nccl_version=info.get("nccl_version", UNKNOWN),
        pid=parse_number(info.get("pid", "")) or 0,
        netns=info.get("netns", ""),
        job=job,
        identity_source=info.get("identity_source", UNKNOWN),
    )
