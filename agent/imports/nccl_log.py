"""NCCL's own log of its calls: `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL`, also RCCL's.

These lines are read (here without what stands before them, and with `…` for addresses):

    NCCL INFO AllReduce: opCount 1f sendbuff … recvbuff … count 1024 datatype 7 op 0 root 0 comm … [nranks=8] stream …
    NCCL INFO ncclCommInitRank comm … rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 65010 commId 0x1f2e - Init COMPLETE
    NCCL INFO comm … rank 3 nranks 8 cudaDev 3 busId 65010 - Destroy COMPLETE
    NCCL INFO Channel 02/0 : 3[3] -> 11[3] [send] via NET/IB/4/GDRDMA

What has to be minded: opCount is hexadecimal and may stay 0, so it numbers nothing; `root` is the peer of Send and
Recv, whose other buffer is `(nil)`; launchers put their own prefixes in front (ray, srun, torchrun, mpirun, loggers),
or wrap lines into JSON (`wrapped_lines`); some logs keep only `[3] NCCL INFO`, where host and process are unknown;
several processes write into one file, so that a line may hold the beginnings of two, and the rest of one stands on a
line of its own; RCCL adds `task` and `globalrank` behind the stream, others add pairs of words in between.

NCCL prints no time unless it is told to (`NCCL_DEBUG_TIMESTAMP_LEVELS`, from 2.26); a launcher may.  Where the first
call of a file has none, times are made up from line numbers: they tell the order, and nothing else.

Source: INFO(NCCL_COLL, …) in src/enqueue.cc, INFO(NCCL_INIT, …) in src/init.cc and src/transport/net.cc, ncclDebugLog
in src/debug.cc of NCCL 2.4 to 2.32; src/enqueue.cc of RCCL.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from railscope.agent.dataset.files import UNNAMED_NODE
from railscope.agent.imports.facts import MOST_RANKS, ImportedConnection, Problems, printable
from railscope.agent.imports.line_times import LineTimes
from railscope.agent.imports.nccl_log_calls import Calls, Kind, Shape, parse_shape
from railscope.agent.imports.nccl_log_communicators import Communicators, LoggedEnd, Process, parse_comm_id
from railscope.agent.imports.nccl_log_scan import (
    DEVICE,
    LONGEST_HEADER,
    MARK,
    MOST_LINES_APART,
    NAMED,
    OTHER,
    ScannedBlock,
    Tail,
    scan_block,
)
from railscope.agent.imports.parallel import Workers
from railscope.agent.imports.sources import Source, line_blocks
from railscope.agent.imports.target import ImportTarget
from railscope.agent.imports.wrapped_lines import unwrap_line, without_codes
from railscope.probes.nccl.abi import Op

FORMAT: Final = "nccl-log"
_STUCK: Final = re.compile(r"^(?:0x[0-9a-f]*|COMPLETE|START)")
_STUCK_BEFORE_A_NAME: Final = re.compile(r"0x[0-9a-f]*|COMPLETE|START|\d+")
"""How messages end; numbers, which names of hosts may begin with, only where what follows is a name already seen."""
_CALL: Final = re.compile(
    r"(?<![A-Za-z])(?P<op>[A-Za-z]{1,32}): opCount [0-9a-fA-F]+ sendbuff \S+ recvbuff \S+(?: \w+ \S+){0,8}? "
    r"count (?P<count>\d{1,19}) "
    r"datatype (?P<type>\d{1,3}) op \d+ root (?P<root>-?\d{1,9}) comm (?P<comm>0x[0-9a-fA-F]{1,16})(?: \w+ \S+){0,8}? "
    r"\[nranks=(?P<nranks>\d{1,9})\] stream (?P<stream>0x[0-9a-fA-F]{1,16}|\(nil\)|0)"
    r"(?: task \d+ globalrank (?P<rank>\d{1,9}))?"
)
_CALL_BEGINS: Final = re.compile(r"[A-Za-z]{1,32}: opCount ")
_EVENT: Final = re.compile(
    r"comm (?P<comm>0x[0-9a-fA-F]{1,16}) rank (?P<rank>\d{1,9}) n[rR]anks (?P<nranks>\d{1,9}) (?P<rest>.{0,300}?) ?- "
    r"(?P<what>Init START|Init COMPLETE|Destroy COMPLETE|Abort COMPLETE)"
)
_LINK: Final = re.compile(
    r"Channel (?P<channel>\d{1,4})/\d+ : (?P<source>\d{1,9})\[[^\]]{0,20}\] -> (?P<target>\d{1,9})\[[^\]]{0,20}\] "
    r"\[(?P<way>send|receive)\] via NET/(?P<network>[^/]{1,60})/(?P<device>\d{1,4})"
)
_PAIR: Final = re.compile(r"(?<![A-Za-z])([A-Za-z]{1,32}) ((?:0x)?-?[0-9a-fA-F]+)")
_LAUNCHER: Final = re.compile(r"(?:\(\w+ pid=\d+(?:, ip=[^()]{1,60})?\) |\[rank\d+\]:|\[\d+,\d+\]<std(?:out|err)>:)$")
"""A prefix that belongs to what follows on the same line: of ray, torchrun, mpirun."""
_BARE: Final = re.compile(r"\[(\d{1,4})\] $")
_RAY_LEFT_OUT: Final = re.compile(r"\[repeated \d+x across ")
_VERSION: Final = "NCCL version "
_OF_TWO: Final = frozenset(op.name for op in (Op.Send, Op.Recv, Op.PutSignal, Op.Signal, Op.WaitSignal))
_PROCESSES_OF_A_FILE: Final = 10_000
"""More than there are numbers of GPUs."""
_MOST_WRITERS: Final = 1 << 16
_MOST_SHAPES: Final = 1 << 16
_MOST_FRAGMENTS: Final = 64
"""Beginnings of calls that wait for the rest of their line; the oldest gives way."""
_BLOCK_BYTES: Final = 1 << 21


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like NCCL's log (NCCL_DEBUG=INFO)."""
    return b"NCCL INFO " in head


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, workers: Workers) -> None:
    """Put the calls and communicators of NCCL's logs into the dataset."""
    communicators = Communicators(target, problems)
    base_ns = min(source.modified_ns for source in sources)
    for place, source in enumerate(sources):
        _Log(source, place, target, problems, communicators, LineTimes(base_ns)).read(workers)
    communicators.finish()


@dataclass(frozen=True, slots=True)
class _Writer:
    """The writer of a line."""

    process: Process
    tid: int


class _Header(NamedTuple):
    """Where in a line a message begins."""

    writer: _Writer
    begin: int
    """Of the host's name."""
    end: int
    """Of the header: there the message begins."""


@dataclass(frozen=True, slots=True)
class _Fragment:
    """The beginning of a call whose rest another writer cut off."""

    writer: _Writer
    text: str
    line: int


class _Log:
    """One file."""

    def __init__(
        self,
        source: Source,
        place: int,
        target: ImportTarget,
        problems: Problems,
        communicators: Communicators,
        times: LineTimes,
    ) -> None:
        """`place`: which of the files it is."""
        self._source = source
        self._place = place
        self._target = target
        self._problems = problems
        self._communicators = communicators
        self._times = times
        self._fragments: deque[_Fragment] = deque()
        self._hosts: dict[str, set[str]] = {}
        """Host names by process identifier, as text."""
        self._writers: dict[tuple[str, str], tuple[_Writer | None, int]] = {}
        """By what stands in front of a message: who it is, and where in it the host's name begins."""
        self._shapes: dict[tuple[str, ...], Shape] = {}
        """By the texts that tell it: a job makes the same calls again and again."""
        self._streams: dict[str, int] = {}
        """By their text."""
        self._calls = Calls()

    def read(self, workers: Workers) -> None:
        first = 0
        with self._source.open() as stream:
            for block in workers.map(scan_block, line_blocks(stream, _BLOCK_BYTES)):
                self._block(first, block)
                self._calls.flush(self._target)
                first += block.lines
            if stream.damage:
                self._skip(0, stream.damage)
        for fragment in self._fragments:
            self._incomplete(fragment)
        if self._times.made_up:
            self._target.times_known = False
            self._problems.add_note(
                "timestamps are synthetic and give only the order: these logs have none "
                "(NCCL_DEBUG_TIMESTAMP_LEVELS=INFO adds them, from NCCL 2.26)"
            )
        elif self._times.resolution_ns is not None:
            self._target.clock_error_ns = max(self._target.clock_error_ns or 0, self._times.resolution_ns)
            self._times.report_doubts(self._problems)

    def _block(self, first: int, block: ScannedBlock) -> None:
        """Read the lines of a block, before which there are `first` others."""
        known: dict[tuple[int, int], tuple[int, LoggedEnd | None]] = {}
        """By head and tail: the kind of a call, and who numbers it."""
        version = self._communicators.version
        calls, times, fragments = self._calls, self._times, self._fragments
        kinds, sequences, moments = calls.kinds, calls.sequences, calls.times
        for place, head, tail, text in zip(block.numbers, block.heads, block.tails, block.texts, strict=True):
            number = first + place
            if head == OTHER:
                if text is None:
                    self._skip(number, "the line is too long")
                elif self._concerns(text):
                    self._line(number, text)
                continue
            if fragments:
                self._forget_fragments(number)
            if version != self._communicators.version:
                known.clear()
                version = self._communicators.version
            found = known.get((head, tail))
            if found is None or not times.made_up:
                said = block.all_heads[head]
                writer, offset = self._writers.get((said.token, said.device)) or self._writer(said.token, said.device)
                assert writer is not None, "only such tokens are plain"
                times.read_prefix(number, text + said.token[:offset] if text and offset else text or "")
                if found is None:
                    kind = self._kind(number, writer, said.op, block.all_tails[tail])
                    if kind is None:
                        continue
                    version = self._communicators.version
                    found = known[head, tail] = calls.add_kind(kind), kind.end if kind.counted else None
            kind_number, end = found
            kinds.append(kind_number)
            sequences.append(None if end is None else end.take_sequence_number())
            moments.append(times.made_up_ns(number) if times.made_up else times.next_call_ns())

    def _forget_fragments(self, number: int) -> None:
        """Give up what begins too far in front of a line."""
        while self._fragments and number - self._fragments[0].line > MOST_LINES_APART:
            self._incomplete(self._fragments.popleft())

    def _line(self, number: int, line: str) -> None:
        if "\x1b" not in line and '{"' not in line:
            self._message_line(number, line)
            return
        line = without_codes(line)
        wrapped = unwrap_line(line, MARK)
        if wrapped is None:
            self._message_line(number, line)
            return
        self._times.read_prefix(number, wrapped.before)
        if wrapped.time is not None:
            self._times.read_number(number, wrapped.time)
        for text in wrapped.texts:
            if self._concerns(text):
                self._message_line(number, text)

    def _concerns(self, line: str) -> bool:
        return MARK in line or "opCount" in line or bool(self._fragments)

    def _message_line(self, number: int, line: str) -> None:
        self._forget_fragments(number)
        headers = self._headers(line)
        before = line[: headers[0].begin] if headers else line
        self._times.read_prefix(number, before)
        if "opCount" in before or (not headers and self._fragments):
            self._rest(number, before)
        elif not headers:
            self._skip(number, "a line of NCCL's without its process")
        if "[repeated " in line and _RAY_LEFT_OUT.search(line):
            self._problems.add_note("Ray left out lines that it took for repeated: RAY_DEDUP_LOGS=0 keeps them all")
        for place, header in enumerate(headers, 1):
            text = line[header.end :]
            if place < len(headers):
                text = _LAUNCHER.sub("", line[header.end : headers[place].begin])
            self._message(number, header.writer, text)

    def _headers(self, line: str) -> list[_Header]:
        """Where processes begin to speak: `host:pid:tid [device] NCCL INFO `."""
        found = []
        begin = 0
        while (at := line.find(MARK, begin)) >= 0:
            words = line[max(begin, at - LONGEST_HEADER) : at].rsplit(" ", 3)
            begin = at + len(MARK)
            device = words[-2] if len(words) > 2 else ""
            token = words[-3] if len(words) > 2 else ""
            writer, offset = self._writers.get((token, device)) or self._writer(token, device)
            if writer is not None:
                start = at - len(device) - len(token) - 2 + offset
                found.append(_Header(writer, start, min(begin + 1, len(line))))
            elif not self._hosts and (bare := _BARE.search(line, max(0, at - LONGEST_HEADER), at)) is not None:
                # Where other lines name their process, this is the rest of one.
                found.append(_Header(self._unnamed(bare[1]), bare.start(), min(begin + 1, len(line))))
        return found

    def _unnamed(self, device: str) -> _Writer:
        """The writer of lines that only name the GPU: processes have one each."""
        number = self._place * _PROCESSES_OF_A_FILE + int(device)
        self._problems.add_note(
            "these logs do not name host and process: each GPU number of a file counts as a process of its own"
        )
        return _Writer(Process(UNNAMED_NODE, -1 - number, device), 0)

    def _writer(self, token: str, device: str) -> tuple[_Writer | None, int]:
        """The form of a writer's token, and where the host's name begins in it; None: it is not such a token."""
        if len(self._writers) >= _MOST_WRITERS:
            self._writers.clear()
        named, number = NAMED.search(token), DEVICE.fullmatch(device)
        if named is None or number is None:
            return self._writers.setdefault((token, device), (None, 0))
        host, pid, tid = named.groups()
        if len(self._hosts) >= _MOST_WRITERS:
            self._hosts.clear()
        known = self._hosts.setdefault(pid, set())
        if host not in known:
            # Where a line end was lost, what stood before it stuck to the host's name.
            stuck = (one for one in known if host.endswith(one) and _STUCK_BEFORE_A_NAME.fullmatch(host[: -len(one)]))
            host = max(stuck, key=len, default="") or _STUCK.sub("", host, count=1) or host
            known.add(host)
        writer = _Writer(Process(host, int(pid), number[1]), int(tid))
        offset = named.end(1) - len(host)
        return self._writers.setdefault((token, device), (writer, offset))

    def _message(self, number: int, writer: _Writer, text: str) -> None:
        call = _CALL.match(text)
        if call is not None:
            self._call(number, writer, call)
            return
        event = _EVENT.search(text)
        if event is not None:
            pairs = dict(_PAIR.findall(event["rest"]))
            if parse_comm_id(pairs.get("commId", "0")) is None:
                self._skip(number, f"an impossible commId: {pairs['commId']}")
                return
            rank, size = int(event["rank"]), int(event["nranks"])
            if not rank < size <= MOST_RANKS:
                self._skip(number, f"rank {rank} of {size}")
                return
            self._communicators.record_event(
                writer.process, writer.tid, event["what"], event["comm"], rank, size, pairs
            )
        elif (link := _LINK.match(text)) is not None:
            self._connected(writer, link)
        elif text.startswith(_VERSION):
            self._communicators.record_version(writer.process, text[len(_VERSION) :].split("+")[0].strip()[:20])
        elif not text.strip() or _CALL_BEGINS.match(text):
            self._fragments.append(_Fragment(writer, text, number))
            if len(self._fragments) > _MOST_FRAGMENTS:
                self._incomplete(self._fragments.popleft())

    def _connected(self, writer: _Writer, link: re.Match[str]) -> None:
        send = link["way"] == "send"
        own, other = (link["source"], link["target"]) if send else (link["target"], link["source"])
        self._communicators.record_connection(
            writer.process,
            writer.tid,
            int(own),
            ImportedConnection(0, int(other), int(link["channel"]), send, link["network"].upper(), int(link["device"])),
        )

    def _rest(self, number: int, text: str) -> None:
        """A line, or its beginning, that has no header: it may be what was cut off another one."""
        for fragment in self._candidates(text):
            call = _CALL.search(fragment.text + text) if fragment.text.strip() else _CALL.search(text)
            if call is not None:
                self._fragments.remove(fragment)
                self._call(number, fragment.writer, call)
                return
        call = _CALL.search(text)
        owner = self._communicators.find_owner(call["comm"]) if call is not None else None
        if call is not None and owner is not None:
            self._call(number, _Writer(owner, 0), call)
        elif "opCount" in text:
            self._skip(number, "a call without its process")

    def _candidates(self, text: str) -> Iterator[_Fragment]:
        """Beginnings that the text may belong to; those of the process that has the communicator first."""
        comm = re.search(r"comm (0x[0-9a-fA-F]+)", text)
        owner = self._communicators.find_owner(comm[1]) if comm is not None else None
        yield from sorted(self._fragments, key=lambda one: owner is None or one.writer.process != owner)

    def _call(self, number: int, writer: _Writer, call: re.Match[str]) -> None:
        op, *said = call.groups()
        kind = self._kind(number, writer, op, cast(Tail, tuple(said)))
        if kind is not None:
            self._calls.kinds.append(self._calls.add_kind(kind))
            self._calls.sequences.append(kind.end.take_sequence_number() if kind.counted else None)
            self._calls.times.append(self._times.next_call_ns())

    def _kind(self, number: int, writer: _Writer, name: str, said: Tail) -> Kind | None:
        """What a call is; None: it cannot be, which is said."""
        count, type_number, root, address, nranks, stream_text, rank = said
        told = name, count, type_number, root, nranks
        shape = self._shapes.get(told)
        if shape is None:
            parsed = parse_shape(*told)
            if isinstance(parsed, str):
                self._skip(number, parsed)
                return None
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[told] = parsed
        # What stands behind the stream may count ranks of the job.
        own = int(rank) if rank is not None and int(rank) < shape.nranks else None
        process = writer.process
        end = self._communicators.find_end(process, address, shape.nranks, own)
        if end is None:
            self._skip(number, "more communicators than possible")
            return None
        # What not all ranks call would make the numbers of their other calls different.
        return Kind(end, process.host, writer.tid or None, self._stream(stream_text), shape, shape.op not in _OF_TWO)

    def _stream(self, text: str) -> int:
        """The address of a stream, as 64 bits with a sign."""
        stream = self._streams.get(text)
        if stream is None:
            if len(self._streams) >= _MOST_SHAPES:
                self._streams.clear()
            number = int(text, 16) if text.startswith("0x") else 0
            stream = self._streams[text] = number - (1 << 64) if number >> 63 else number
        return stream

    def _incomplete(self, fragment: _Fragment) -> None:
        if fragment.text.strip():
            self._skip(fragment.line, f"a call on a truncated line: {printable(fragment.text, 60)}")

    def _skip(self, number: int, reason: str) -> None:
        self._problems.count_skipped(self._source.name, number, reason)
