"""What NCCL's RAS answers (`ncclras`, `ncclras -f json`; NCCL 2.24 and newer): how many operations each rank launched.

As JSON, every rank with its counts:

    {"nccl_version": "2.28.7", …, "timestamp": "2026-01-06 10:11:12", "communicators_count": 1, "communicators": [
     {"hash": "0x9f2a…", "secondary_hash": "…", "size": 4, "ranks_count": 3, "missing_ranks_count": 1, "ranks": [
      {"rank": 0, "host": "10.0.0.1", "pid": 71, "cuda_dev": 0, "nvml_dev": 0, "status": {"init_state": 0,
       "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false},
       "collective_counts": {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 7}}],
      "missing_ranks": [{"rank": 3, "host": "10.0.0.2", "pid": 72, "cuda_dev": 3, "nvml_dev": 3, "status":
       {"unresponsive": true, "considered_dead": false}}]}], "ras": {"collection_time_sec": 0.1, "timeouts_count": 0}}

As text, a table of communicators by size, and below it only what is odd:

    #0-0 (9f2a…) MISMATCH
      Communicator ranks have different AllReduce operation counts
      3 ranks have launched up to operation 7
      Rank 2 has launched up to operation 6 -- GPU 2 managed by process 73 on node 10.0.0.1

RAS knows what was launched, and not what completed.  Ranks are asked one after the other.

Source: src/ras/client_support.cc of NCCL 2.24 to 2.30.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from railscope.agent.cluster.fleet.dumps import Dumps
from railscope.agent.cluster.fleet.facts import Rank, Stall
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.dataset.files import UNNAMED_NODE
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.imports.facts import MOST_RANKS, ImportedEnd, Problems
from railscope.agent.imports.json_stream import small_number, text, whole_number
from railscope.agent.imports.sources import Source, read_whole

if TYPE_CHECKING:
    # Imports pyarrow, which `railscope diagnose` has no need of.
    from railscope.agent.imports.target import ImportTarget

FORMAT: Final = "nccl-ras"
_MOST_BYTES: Final = 1 << 28
_LARGEST_SIZE: Final = 1 << 17
"""Ranks of a communicator: each is looked for where some are missing."""
_MOST_FILLED: Final = 1 << 20
"""Ranks that a text does not name, of all its communicators."""
_TO_ONE: Final = frozenset({"Send", "Recv", "SendRecv"})
_TABLE_ROW: Final = re.compile(r" *(\d{1,9})(?: +[\d-]{1,20}){3} +(\d{1,9}) +\d{1,9} +[A-Z]+ +[A-Z]+ *$")
"""Number of the group, and ranks of its communicators."""
_HEAD: Final = re.compile(r"#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)$")
_COUNTS: Final = re.compile(r"  Communicator ranks have different (\w{1,40}) operation counts$")
_MANY: Final = re.compile(
    r"  (\d{1,9}) ranks have (?:launched up to operation (\d{1,18})|not launched any operations)$"
)
_RANK: Final = re.compile(
    r"  Rank (\d{1,9})(?: has launched up to operation (?P<count>\d{1,18})| has (?P<none>not launched any operations)| "
    r"has status (?P<status>\w{1,40})| reported (?P<error>.{1,100}?))? -- "
    r"(?:GPU (?P<gpu>\d{1,4})(?: \(NVML \d{1,4}\))? managed by process (?P<pid>\d{1,10}) on node (?P<host>\S{1,255})|"
    r"\[process information not found\])$"
)


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like an answer of NCCL's RAS, as text or as JSON."""
    if b'"communicators_count"' in head and b'"collective_counts"' in head:
        return True
    return b"Job summary\n===========" in head and b"Communicators..." in head


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems) -> None:
    """Put the communicators that answers of NCCL's RAS name into the dataset: of operations they only have counts."""
    for source in sources:
        for comm, one in sorted(_read(source, problems).communicators.items()):
            for number, seen in sorted(one.ranks.items()):
                node = seen.host or UNNAMED_NODE
                end = ImportedEnd(
                    instance=target.new_instance(node),
                    comm=comm,
                    rank=number,
                    nranks=one.size,
                    pid=seen.pid,
                    gpu=seen.gpu or None,
                )
                target.add_ends(node, [end])
    target.times_known = False
    problems.add_note(
        "answers of NCCL's RAS tell communicators and how many operations ranks launched, and no single operation: "
        "railscope diagnose reads who is behind"
    )


@dataclass(slots=True)
class _Seen:
    """One rank of one communicator."""

    host: str = ""
    pid: int | None = None
    gpu: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    missing: bool = False
    left: bool = False
    said: str = ""
    """What is odd of it, in words."""


@dataclass(slots=True)
class _Communicator:
    size: int | None = None
    ranks: dict[int, _Seen] = field(default_factory=dict)

    def seen(self, rank: int) -> _Seen:
        return self.ranks.setdefault(rank, _Seen())

    def fill(self, op: str, value: int) -> None:
        """Give a count to all ranks that the text does not name, as most have it."""
        for rank in range(self.size or 0):
            self.seen(rank).counts.setdefault(op, value)

    @property
    def unnamed(self) -> int:
        """How many of its ranks are not known yet."""
        return max(0, (self.size or 0) - len(self.ranks))


@dataclass(frozen=True, slots=True)
class _Answer:
    at: float
    communicators: Mapping[str, _Communicator]


def read_ras_answers(sources: Sequence[Source], problems: Problems) -> Dumps:
    """What answers of NCCL's RAS tell; of several, what moved between the first and the last one is seen to go on."""
    answers = sorted((_read(source, problems) for source in sources), key=lambda one: one.at)
    last = answers[-1]
    first = next((one for one in answers if one.at < last.at), None)
    ranks: list[Rank] = []
    notes: list[str] = []
    for comm, one in sorted(last.communicators.items()):
        before = first.communicators.get(comm) if first is not None else None
        ranks += _ranks(comm, one, before)
        notes += [f"rank {number} of {comm}: {seen.said}" for number, seen in sorted(one.ranks.items()) if seen.said]
    return Dumps(
        at=last.at,
        ranks=tuple(ranks),
        told=(f"{format_count(len(answers), 'answer')} of NCCL's RAS",),
        open=("RAS counts what was launched: whether it completes is not known",),
        tells_completion=False,
        momentary=first is None,
        notes=tuple(notes),
    )


def _ranks(comm: str, one: _Communicator, before: _Communicator | None) -> Iterator[Rank]:
    most: defaultdict[str, int] = defaultdict(int)
    least: dict[str, int] = {}
    here = {number: seen for number, seen in one.ranks.items() if not seen.missing}
    for seen in here.values():
        for op, count in seen.counts.items():
            most[op] = max(most[op], count)
            least[op] = min(least.get(op, count), count)
    apart = [op for op in most if op not in _TO_ONE and most[op] != least[op]]
    moved = before is not None and any(
        number in before.ranks and before.ranks[number].counts != seen.counts for number, seen in here.items()
    )
    for number, seen in sorted(one.ranks.items()):
        labels = {"pid": str(seen.pid or ""), "gpu": seen.gpu or "unknown"}
        if one.size is not None:
            labels["nranks"] = str(one.size)
        made = sum(count for op, count in seen.counts.items() if op not in _TO_ONE)
        ahead = next((op for op in apart if seen.counts.get(op) == most[op]), "")
        yield Rank(
            rank_identity_from_labels(comm, str(number), labels, ()),
            host=seen.host,
            present=not seen.missing,
            ended=seen.left,
            enqueued=None if seen.missing or not seen.counts else made,
            position=None if seen.missing or not seen.counts else Position(made),
            moving=moved,
            stall=Stall(ahead, Cause.RANK_BEHIND, "strong") if ahead and not moved and not seen.missing else None,
        )


def _read(source: Source, problems: Problems) -> _Answer:
    at = source.modified_ns / 1e9
    with source.open() as stream:
        content = read_whole(stream, _MOST_BYTES)
    if content is None:
        problems.count_skipped(source.name, 0, f"larger than {_MOST_BYTES} bytes")
        return _Answer(at, {})
    if content.lstrip()[:1] != b"{":
        return _Answer(at, _of_text(content.decode("utf-8", "replace").splitlines()))
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        problems.count_skipped(source.name, 0, f"no JSON: {error}")
        return _Answer(at, {})
    return _of_json(said, at) if isinstance(said, dict) else _Answer(at, {})


def _of_json(said: Mapping[str, Any], at: float) -> _Answer:
    found: dict[str, _Communicator] = {}
    listed = said.get("communicators")
    for one in listed if isinstance(listed, list) else []:
        comm = _hash(text(one.get("hash"))) if isinstance(one, dict) else ""
        if not comm:
            continue
        size = small_number(one.get("size"))
        communicator = _Communicator(size if size is not None and size <= _LARGEST_SIZE else None)
        for name in ("ranks", "missing_ranks"):
            ranks = one.get(name)
            for rank in ranks if isinstance(ranks, list) else []:
                number = small_number(rank.get("rank")) if isinstance(rank, dict) else None
                if number is not None and number < MOST_RANKS:
                    communicator.ranks[number] = _rank_of_json(rank, missing=name == "missing_ranks")
        found[comm] = communicator
    with contextlib.suppress(ValueError):
        at = calendar.timegm(time.strptime(text(said.get("timestamp"))[:19], "%Y-%m-%d %H:%M:%S"))
    return _Answer(at, found)


def _rank_of_json(rank: Mapping[str, Any], *, missing: bool) -> _Seen:
    counts, status = rank.get("collective_counts"), rank.get("status")
    status = status if isinstance(status, dict) else {}
    seen = _Seen(
        host=text(rank.get("host"))[:255],
        pid=small_number(rank.get("pid")),
        gpu=str(small_number(rank.get("nvml_dev")) if small_number(rank.get("nvml_dev")) is not None else ""),
        missing=missing,
    )
    for op, value in counts.items() if isinstance(counts, dict) else ():
        count = whole_number(value)
        if count is not None and count >= 0:
            seen.counts[str(op)[:40]] = count
    if status.get("considered_dead") is True:
        seen.said = "NCCL's RAS takes its process for dead"
    elif status.get("unresponsive") is True:
        seen.said = "its process does not answer NCCL's RAS"
    elif small_number(status.get("async_error")) not in (None, 0, 7):
        seen.said = f"NCCL's asynchronous error {status.get('async_error')}"
    elif small_number(status.get("init_state")) not in (None, 0, 7):
        seen.said = f"its init ended with NCCL's error {status.get('init_state')}"
    for flag, words in (("abort_flag", "aborts"), ("destroy_flag", "destroys"), ("finalize_called", "finalizes")):
        if status.get(flag) is True:
            seen.left, seen.said = True, f"it {words} the communicator"
            break
    return seen


def _hash(said: str) -> str:
    """A communicator's hash as 16 hex digits; empty: it is none."""
    digits = said.lower().removeprefix("0x")
    return digits.zfill(16) if re.fullmatch(r"[0-9a-f]{1,16}", digits) else ""


def _of_text(lines: Sequence[str]) -> dict[str, _Communicator]:
    sizes: dict[str, int] = {}
    found: dict[str, _Communicator] = {}
    current: _Communicator | None = None
    kind, op, last = "", "", 0
    usual: tuple[int, int] | None = None
    """Count that most ranks have, and how many these are."""
    left = _MOST_FILLED

    def close() -> None:
        nonlocal left
        if current is not None and op and usual is not None and current.unnamed <= left:
            left -= current.unnamed
            current.fill(op, usual[0])

    for line in lines:
        row = _TABLE_ROW.match(line)
        if row is not None and not found:
            sizes[row[1]] = int(row[2])
        head = _HEAD.match(line)
        if head is not None:
            close()
            current = found.setdefault(_hash(head[2]), _Communicator(_known_size(sizes.get(head[1], 0))))
            kind, op, usual = head[3], "", None
            continue
        if current is None:
            continue
        counts, many, rank = _COUNTS.match(line), _MANY.match(line), _RANK.match(line)
        if counts is not None:
            close()
            op, usual = counts[1], None
        elif many is not None and op:
            # Ranks that stand below it have this count; where there are many they are not listed.
            usual = (int(many[2] or 0), int(many[1])) if usual is None or int(many[1]) > usual[1] else usual
            last = int(many[2] or 0)
        elif rank is not None and int(rank[1]) < MOST_RANKS:
            seen = current.seen(int(rank[1]))
            seen.host, seen.pid = rank["host"] or seen.host, int(rank["pid"] or 0) or seen.pid
            seen.gpu = rank["gpu"] or seen.gpu
            if kind == "INCOMPLETE":
                seen.missing, seen.said = True, "its process does not answer NCCL's RAS"
            elif kind == "ERROR":
                seen.said = f"it reported {rank['error']}" if rank["error"] else seen.said
            elif rank["status"]:
                seen.said = f"its communicator's status is {rank['status']}"
            elif op:
                seen.counts[op] = int(rank["count"]) if rank["count"] else 0 if rank["none"] else last
    close()
    return found


def _known_size(size: int) -> int | None:
    return size if 0 < size <= _LARGEST_SIZE else None
