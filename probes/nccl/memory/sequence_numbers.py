"""Reads NCCL's sequence numbers of a communicator's collectives from outside.

From 2.26 on `ncclComm.seqNumber` counts, for each function, the collectives that were launched since the communicator
was made, whether a profiler is loaded or not (`ncclProfilerStartTaskEvents` in src/plugin/profiler.cc): NCCL's own RAS
compares it across ranks.  2.23 to 2.25 have the field and count there only for a profiler.  Point to point, what NCCL
makes of it (AlltoAll, Gather, Scatter), collectives without an element, of copy engines and symmetric kernels and those
captured into a CUDA graph are not in it.

A call is counted by the end of its launch.  Whether one is under way shows in `ncclComm.groupNext`: it is 1 but
between a call's first task and the end of the launch (`ncclGroupCommJoin`, `ncclGroupCommLeave` in src/include/group.h;
from 2.27 on an array, whose first element is that of collectives).  While a captured graph lives
(`ncclSharedResources.persistentRefs`), launches may be counted later, from the stream: then nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.records.errors import COMMUNICATOR_MAGIC
from railscope.probes.processes.memory import read_memory

FIRST_VERSION: Final = (2, 26)
"""The first that counts without a profiler."""
FUNCTIONS: Final = 5
"""NCCL_NUM_FUNCTIONS of 2.23 to 2.32: Broadcast, Reduce, AllGather, ReduceScatter, AllReduce."""
_MOST_LAUNCHED: Final = 1 << 40
"""By one function, more than any job launches: but a process may write into its memory what it likes."""
_NUMBER_BYTES: Final = 8
_NOT_IN_A_GROUP: Final = 1
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Offsets of one build, bytes."""

    comm_hash: int
    sequence_numbers: int
    group_next: int
    shared_resources: int
    persistent_refs: int
    """Within the shared resources."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Where a communicator stands, as NCCL counts."""

    collectives: int
    """Launched since the communicator was made."""
    settled: bool
    """No call is under way, and no captured graph lives: all that was called and that NCCL counts is counted."""
    by_function: tuple[int, ...] = ()
    """The same by function, numbered as `Op` (probes/nccl/abi.py)."""
    captured: bool = False
    """A captured graph lives."""


def sequence_layout(structures: Mapping[str, Structure], nccl_version: str) -> SequenceLayout | None:
    """Where a build's communicators keep their sequence numbers; None: the build is not known, or does not count."""
    comm, shared = structures.get("ncclComm"), structures.get("ncclSharedResources")
    version = _VERSION.match(nccl_version)
    if comm is None or shared is None or version is None or (int(version[1]), int(version[2])) < FIRST_VERSION:
        return None
    try:
        return SequenceLayout(
            comm_hash=comm.offsets["commHash"],
            sequence_numbers=comm.offsets["seqNumber"],
            group_next=comm.offsets["groupNext"],
            shared_resources=comm.offsets["sharedRes"],
            persistent_refs=shared.offsets["persistentRefs"],
        )
    except KeyError:
        return None


def read_launched(memory: int, comm: int, comm_hash: int, layout: SequenceLayout) -> Launched | None:
    """What a communicator counts of its operations; None: the one of this hash is not at this address (any more).

    None as well where what is there is no count that NCCL would come to.
    `memory` is a descriptor of the process's /proc/PID/mem.  A call that begins meanwhile may be missed: who knows that
    none did may believe `settled`.
    """
    if _number(memory, comm) != COMMUNICATOR_MAGIC or _number(memory, comm + layout.comm_hash) != comm_hash:
        return None
    shared = _number(memory, comm + layout.shared_resources)
    # In this order: a call that ends in between is counted by then.
    group_next = _number(memory, comm + layout.group_next)
    numbers = read_memory(memory, FUNCTIONS * _NUMBER_BYTES, comm + layout.sequence_numbers)
    if group_next is None or numbers is None or not shared:
        return None
    references = read_memory(memory, 4, shared + layout.persistent_refs)
    if references is None:
        return None
    by_function = tuple(
        int.from_bytes(numbers[at : at + _NUMBER_BYTES], "little") for at in range(0, len(numbers), _NUMBER_BYTES)
    )
    if max(by_function) > _MOST_LAUNCHED:
        return None
    captured = any(references)
    return Launched(sum(by_function), group_next == _NOT_IN_A_GROUP and not captured, by_function, captured)


def _number(memory: int, address: int) -> int | None:
    data = read_memory(memory, _NUMBER_BYTES, address)
    return None if data is None else int.from_bytes(data, "little")
