"""The JSON of `/stalls` and of the socket of verdicts: which fields there are, of which type, and what each means.

docs/reference/stalls.schema.json and verdicts.schema.json are made from these types (`python -m tests.docs.reference`),
and mypy holds the code that fills them to them.  Times are nanoseconds since 1970 (`_realtime_ns`), lengths seconds.
A later version may add fields.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import Confidence, Strength


class ProcessDocument(TypedDict, total=False):
    """A process that maps NCCL; what is not known is absent."""

    user: Annotated[str, "name of its real user on this host, or the user's number"]
    program: Annotated[str, "program without arguments, such as python3 train.py"]
    read_realtime_ns: Annotated[int, "when the following fields were read"]
    cpu_seconds: Annotated[float, "user and system time of all threads since it began"]
    resident_bytes: Annotated[int, "resident memory"]
    threads: Annotated[int, "number of its threads"]
    start_realtime_ns: Annotated[int, "when it began"]


class StackDocument(TypedDict):
    """Where the Python code of a blamed rank's main thread stood."""

    taken_realtime_ns: Annotated[int, "when it was read"]
    lines: NotRequired[Annotated[list[str], "function (file:line), innermost first"]]
    unknown: NotRequired[Annotated[str, "why there are no lines"]]


class StallDocument(TypedDict):
    """One rank's operation that does not complete in time, or its call that does not return."""

    comm: Annotated[str, "name of the communicator: NCCL's commHash as 16 hexadecimal digits"]
    rank: Annotated[int | None, "rank that is stalled; null if unknown"]
    nranks: Annotated[int | None, "number of ranks of the communicator; null if unknown"]
    pid: Annotated[int, "process of the rank, as the host numbers it"]
    process: Annotated[ProcessDocument, "what is known of that process"]
    op: Annotated[str, "operation by NCCL's name, or name of the call that does not return"]
    payload_bytes: Annotated[int | None, "payload of the operation; null if unknown"]
    cause: Annotated[Cause, "why, by the evidence of this host"]
    strength: Annotated[
        Strength,
        "strong: a probe saw the operation in flight; weak: it is inferred, or the rail's other end may be to blame",
    ]
    since_realtime_ns: Annotated[int, "when the operation was handed over"]
    flagged_realtime_ns: Annotated[int, "when it was found to be a stall"]
    ended_realtime_ns: Annotated[int | None, "when it ended; null while it goes on"]
    seconds: Annotated[float, "how long it has lasted"]
    blamed_rank: Annotated[int | None, "rank that the cause names; null if none"]
    rail: Annotated[str, "number of the rail that the cause names; empty if none"]
    device: Annotated[str, "network device of that rail; empty if none"]
    netns: Annotated[str, "network namespace of that device, if its name occurs in several; else empty"]
    evidence: Annotated[list[str], "sentences, the weightiest first"]
    library: NotRequired[Annotated[str, "library whose transfer it is; absent: NCCL"]]
    peer: NotRequired[Annotated[str, "other end of a transfer: the library's name for it, or its address, if known"]]
    blamed_pid: NotRequired[Annotated[int, "process at the other end that is to blame, where it is on this host"]]
    blamed_stack: NotRequired[Annotated[StackDocument, "on /stalls only, with --stall.stacks"]]


class SlowRankDocument(TypedDict):
    """A rank for which the others of this host wait in most operations, though nothing hangs."""

    comm: Annotated[str, "name of the communicator"]
    rank: Annotated[int | None, "rank for which the others wait; null if unknown"]
    pid: Annotated[int | None, "its process; null if unknown"]
    cause: Annotated[Literal[Cause.RANK_SLOW], "always this one"]
    strength: Annotated[Strength, "strong: seen by completions; weak: by calls alone"]
    since_realtime_ns: Annotated[int, "since when"]
    waited_ratio: Annotated[float, "fraction of the time for which the others wait, 0 to 1"]
    waited_seconds: Annotated[float, "how long they wait in an operation"]
    evidence: Annotated[list[str], "sentences, the weightiest first"]


class StallsDocument(TypedDict):
    """The answer to GET /stalls."""

    simulated: Annotated[bool, "whether an input is recorded or synthesised"]
    stalls: Annotated[list[StallDocument], "stalls that go on"]
    ended: Annotated[list[StallDocument], "the last ones that ended"]
    slow: Annotated[list[SlowRankDocument], "slow ranks"]


Change = Literal["standing", "begun", "changed", "ended"]


class HelloLine(TypedDict):
    """The first line that a client of the socket gets."""

    version: Annotated[int, "version of the lines; another number means that a field has another meaning"]
    event: Annotated[Literal["hello"], "always this one"]
    host: Annotated[str, "name of the host"]
    railscope: Annotated[str, "version of the agent"]
    stalls: Annotated[int, "number of stalls that stand; a line for each follows"]
    lost: Annotated[int, "lines before this one that the agent could not keep for this client"]


class VerdictLine(TypedDict):
    """A stall that stands, begins, changes its cause, rank or rail, or ends."""

    version: Annotated[int, "version of the lines; another number means that a field has another meaning"]
    event: Annotated[Change, "standing: it was there before the client; changed: another cause, rank or rail is blamed"]
    id: Annotated[str, "one stall, from begun to ended"]
    confidence: Annotated[
        Confidence,
        "high: the operation is seen in flight and this host's evidence names the culprit; medium: one of both",
    ]
    verdict: Annotated[StallDocument, "the stall as /stalls shows it"]
    lost: Annotated[int, "lines before this one that the agent could not keep for this client"]
