"""Finds the plain calls in a block of an NCCL log: what needs nothing but the line itself.

Nearly every line of a large log is a call in the form that NCCL prints, behind a prefix that it has in common with
others.  Of these only the parts are kept, each text once; every other line that may concern the importer is kept as it
is.  A block needs no other one, so that blocks are scanned on all processors; `nccl_log` gives the parts their meaning,
in the order of the lines.

A line is a plain call only where `nccl_log` would find the same in it: one header with host, process and thread, the
call behind it, and nothing more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from railscope.agent.imports.sources import lines_of_block

MARK: Final = "NCCL INFO"
LONGEST_HEADER: Final = 512
MOST_LINES_APART: Final = 1_000
"""Lines in which the rest of one may be."""
NAMED: Final = re.compile(r"(?<![A-Za-z0-9_.-])([A-Za-z0-9_.-]+):(\d{1,10}):(\d{1,10})$")
DEVICE: Final = re.compile(r"\[(-?\d{1,4})\]")
_OP_COUNT: Final = ": opCount "
_COUNT: Final = " count "
_BETWEEN: Final = re.compile(
    r": opCount [0-9a-fA-F]+ sendbuff (?:0x[0-9a-f]+|\(nil\)) recvbuff (?:0x[0-9a-f]+|\(nil\))", re.ASCII
)
_TAIL: Final = re.compile(
    r" count (\d{1,19}) datatype (\d{1,3}) op \d+ root (-?\d{1,9}) comm (0x[0-9a-fA-F]{1,16}) "
    r"\[nranks=(\d{1,9})\] stream (0x[0-9a-fA-F]{1,16}|\(nil\)|0)(?: task \d+ globalrank (\d{1,9}))?",
    re.ASCII,
)
_OP: Final = re.compile(r"[A-Za-z]{1,32}")
_MOST_KEPT: Final = 1 << 16
"""Texts of a block."""
OTHER: Final = -1


@dataclass(frozen=True, slots=True)
class Head:
    """What stands in front of the call, but for what stands in front of the token."""

    token: str
    """`host:pid:tid`, perhaps with something stuck to it."""
    device: str
    op: str


Tail = tuple[str, str, str, str, str, str, str | None]
"""Count, data type, root, communicator, number of ranks, stream and rank of a call, as they are written."""


@dataclass(frozen=True, slots=True)
class ScannedBlock:
    """The lines of a block that concern the importer: the lists have an entry for each."""

    lines: int
    """How many the block has."""
    numbers: list[int]
    """From 1."""
    heads: list[int]
    """Which of `all_heads`; OTHER: no plain call."""
    tails: list[int]
    """Which of `all_tails`, of a plain call."""
    texts: list[str | None]
    """What stands in front of the token of a plain call, and the whole of other lines; None: too long to be one."""
    all_heads: list[Head]
    all_tails: list[Tail]


class _Scan:
    """One block."""

    def __init__(self) -> None:
        self.head_numbers: dict[str, int] = {}
        """By the text from the token on."""
        self.tail_numbers: dict[str, int] = {}
        self.all_heads: list[Head] = []
        self.all_tails: list[Tail] = []

    def head(self, text: str) -> int:
        """The number of a head; OTHER: it is none."""
        words = text.split(" ")
        # The token, [device], NCCL, INFO and the operation.
        plain = (
            len(words) == 5
            and words[2:4] == ["NCCL", "INFO"]
            and NAMED.search(words[0]) is not None
            and DEVICE.fullmatch(words[1]) is not None
            and _OP.fullmatch(words[4]) is not None
            and len(self.all_heads) < _MOST_KEPT
        )
        number = OTHER
        if plain:
            number = len(self.all_heads)
            self.all_heads.append(Head(words[0], words[1], words[4]))
        if len(self.head_numbers) < _MOST_KEPT:
            self.head_numbers[text] = number
        return number

    def tail(self, text: str) -> int:
        """The number of a tail; OTHER: it is none."""
        found = _TAIL.fullmatch(text)
        number = OTHER
        if found is not None and len(self.all_tails) < _MOST_KEPT:
            number = len(self.all_tails)
            self.all_tails.append(found.groups())  # type: ignore[arg-type]
        if len(self.tail_numbers) < _MOST_KEPT:
            self.tail_numbers[text] = number
        return number


def scan_block(block: bytes) -> ScannedBlock:
    """Sort the lines of a block."""
    lines = lines_of_block(block)
    odd = b"\x1b" in block or b'{"' in block or b"[repeated " in block
    scan = _Scan()
    numbers: list[int] = []
    heads: list[int] = []
    tails: list[int] = []
    texts: list[str | None] = []
    head_of, tail_of, between = scan.head_numbers.get, scan.tail_numbers.get, _BETWEEN.fullmatch
    # The rest of a line that another writer cut off may stand on a line that says nothing by itself.
    kept_until = MOST_LINES_APART + 1
    for number, line in enumerate(lines, 1):
        if line is None:
            numbers.append(number)
            heads.append(OTHER)
            tails.append(OTHER)
            texts.append(None)
            continue
        at = line.find(_OP_COUNT)
        if at > 0:
            mark = line.rfind(MARK, 0, at)
            count = line.find(_COUNT, at)
            if mark > 0 and count > 0 and between(line, at, count) is not None:
                start = line.rfind(" ", 0, mark - 1)
                start = line.rfind(" ", 0, start) + 1 if start > 0 else 0
                text = line[start:at]
                head = head_of(text)
                if head is None:
                    head = scan.head(text)
                text = line[count:]
                tail = tail_of(text)
                if tail is None:
                    tail = scan.tail(text)
                before = line[:start]
                if (
                    head >= 0
                    and tail >= 0
                    and mark - start <= LONGEST_HEADER
                    and (not before or (MARK not in before and "opCount" not in before))
                    and not (odd and ("\x1b" in line or '{"' in line or "[repeated " in line))
                ):
                    numbers.append(number)
                    heads.append(head)
                    tails.append(tail)
                    texts.append(before)
                    continue
        if at >= 0 or MARK in line or "opCount" in line:
            # Of these some cut off a call.
            kept_until = number + MOST_LINES_APART + 1
        elif number >= kept_until:
            continue
        numbers.append(number)
        heads.append(OTHER)
        tails.append(OTHER)
        texts.append(line)
    return ScannedBlock(len(lines), numbers, heads, tails, texts, scan.all_heads, scan.all_tails)
