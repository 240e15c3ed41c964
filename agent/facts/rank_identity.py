"""Who one rank's end of one communicator is: the one record, which all other facts of a rank hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN, parse_number

Labels = tuple[tuple[str, str], ...]
"""Label names and values in the order in which they are shown."""
RankKey = tuple[str, str]
"""Communicator and rank: what series of a rank's numbers carry."""


@dataclass(frozen=True, slots=True)
class RankGpu:
    """The GPU that a rank uses, as this host and its other exporters call it."""

    number: str = UNKNOWN
    """NVML's on this host, as `nvidia-smi` shows it."""
    uuid: str = UNKNOWN
    pci_bus_id: str = UNKNOWN
    """As NVML and dcgm-exporter write it: 00000000:1B:00.0."""


NO_GPU: Final = RankGpu()
"""Nothing is known of it."""


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
    """NVML's number of it on this host."""
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
    gpu_uuid: str = UNKNOWN
    pci_bus_id: str = UNKNOWN
    """Of the GPU, as NVML and dcgm-exporter write it: 00000000:1B:00.0."""

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
        return next((name for fact in ("job", "pod") if (name := self.of_job(fact)) not in ("", UNKNOWN)), "")

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
        gpu_uuid=info.get("gpu_uuid", UNKNOWN),
        pci_bus_id=info.get("pci_bus_id", UNKNOWN),
    )
