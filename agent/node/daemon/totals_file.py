"""The file of totals: a folder that belongs to one agent, and a format with a checksum.

The file is replaced by rename(2) and never synced to disk: a process that is killed leaves the kernel's page cache as
it is, and what a crash of the machine would lose belongs to a boot whose totals nobody continues.  It stays with its
owner (0600), is read with a bound and a checksum, and only from a folder that nobody else may write to.  A lock that
belongs to the process, and so to none of its children, keeps two agents from sharing one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.facts.catalogue import METRICS
from railscope.agent.facts.histogram import Histogram
from railscope.exporters.series.earlier import Totals, is_continued
from railscope.exporters.series.family import LabelValues

_log = logging.getLogger("railscope.totals")

FILE: Final = "totals"
LOCK: Final = "lock"
FORMAT: Final = 1
MOST_BYTES: Final = 64 << 20
_PARTIAL: Final = "totals.partial"
_MAGIC: Final = b"railscope totals"
_CONTINUED: Final = {metric.name: metric for metric in METRICS if is_continued(metric)}


class StateError(Exception):
    """Totals cannot be kept in this folder; one line says why."""


class UnreadableTotalsError(Exception):
    """What was saved cannot be used; one line says why."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What the file holds."""

    boot: str
    """Of the machine, as the kernel names it."""
    agent: str
    """Version of the agent that wrote it."""
    stamp_ns: int
    """When it was saved, on the clock of the boot."""
    dark_ns: int
    """How long no agent had counted until then, in this boot."""
    totals: Totals


class TotalsFolder:
    """A folder that this process alone keeps totals in, until it is closed."""

    def __init__(self, path: Path) -> None:
        """Open the folder, make it where it is missing (0700), and lock it.

        Raises:
            StateError: it cannot be opened, others may write to it, or another agent has it.
        """
        self._fd = open_folder(path)
        try:
            self._lock_fd = _lock(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, boot: str, now_ns: int, procfs: Path) -> Saved:
        """What an agent of this boot saved; of ranks, those whose processes still run.

        Raises:
            OSError: it cannot be read.
            UnreadableTotalsError: it is damaged, or of another boot or format.
        """
        fd = os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                raise UnreadableTotalsError("it is not a file of the agent's user")
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UnreadableTotalsError(f"it is larger than {MOST_BYTES >> 20} MiB")
        return decode(content, boot, now_ns, procfs)

    def write(self, content: bytes) -> None:
        """Replace what is there, all at once.

        Raises:
            OSError: it cannot be written; what was there stays.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(_PARTIAL, flags, 0o600, dir_fd=self._fd)
        with os.fdopen(fd, "wb", buffering=0) as file:
            written = 0
            while written < len(content):
                written += file.write(content[written:]) or 0
        os.replace(_PARTIAL, FILE, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def close(self) -> None:
        """Let another agent have the folder."""
        os.close(self._lock_fd)
        os.close(self._fd)


def open_folder(path: Path) -> int:
    """A descriptor of the folder in which an agent's totals outlive it; it is made where it is missing (0700).

    Raises:
        StateError: it cannot be opened, or others may write to it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from None
    facts = os.fstat(fd)
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise StateError(f"{path}: others may write to it; it must belong to the agent's user, with mode 0700")
    return fd


def _lock(folder: int, path: Path) -> int:
    try:
        fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        raise StateError(f"{path / LOCK}: {error.strerror}") from None
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise StateError(f"{path}: another agent keeps its totals there") from None
    return fd


def encode(saved: Saved) -> bytes:
    """The content of the file of totals: a line with the format and a checksum, and JSON."""
    body = json.dumps(
        {
            "boot": saved.boot,
            "agent": saved.agent,
            "stamp_ns": saved.stamp_ns,
            "dark_ns": saved.dark_ns,
            "values": {name: list(series.items()) for name, series in saved.totals.values.items()},
            "histograms": {
                name: [(labels, one.bounds, one.counts, one.sum) for labels, one in series.items()]
                for name, series in saved.totals.histograms.items()
            },
            "ranks": [(*rank, pid) for rank, pid in saved.totals.pids.items()],
            "positions": [(*rank, count) for rank, count in saved.totals.positions.items()],
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    return b"%s %d %08x\n%s" % (_MAGIC, FORMAT, zlib.crc32(body), body)


def decode(content: bytes, boot: str, now_ns: int, procfs: Path) -> Saved:
    """The totals in the content of their file.

    Raises:
        UnreadableTotalsError: it is damaged, or of another boot or format.
    """
    head, _, body = content.partition(b"\n")
    match head.rsplit(b" ", 2):
        case [magic, number, checksum] if magic == _MAGIC:
            if number != b"%d" % FORMAT:
                raise UnreadableTotalsError(
                    f"it has the format of another version ({number.decode('ascii', 'replace')})"
                )
            if checksum != b"%08x" % zlib.crc32(body):
                raise UnreadableTotalsError("it is damaged")
        case _:
            raise UnreadableTotalsError("it is damaged")
    try:
        fields = json.loads(body)
        if fields["boot"] != boot or not boot:
            raise UnreadableTotalsError("it is of another boot of this machine")
        stamp_ns, dark_ns = _whole(fields["stamp_ns"]), _whole(fields["dark_ns"])
        if stamp_ns > now_ns:
            raise UnreadableTotalsError("it was saved later than now")
        return Saved(boot, str(fields["agent"]), stamp_ns, dark_ns, _totals(fields, procfs))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableTotalsError(f"it is damaged: {type(error).__name__}") from None


def _totals(fields: Any, procfs: Path) -> Totals:
    """The totals of metrics that this version has too, under the labels that it gives them."""
    totals, left_out = Totals(), set[str]()
    for name, series in fields["values"].items():
        for labels, value in series:
            if not _is_known(name, labels, "counter"):
                left_out.add(name)
            else:
                totals.values.setdefault(name, {})[_labels(labels)] = _number(value)
    for name, series in fields["histograms"].items():
        for labels, bounds, counts, total in series:
            if not _is_known(name, labels, "histogram"):
                left_out.add(name)
                continue
            if len(counts) != len(bounds) + 1:
                raise ValueError(name)
            totals.histograms.setdefault(name, {})[_labels(labels)] = Histogram(
                tuple(float(_number(bound)) for bound in bounds),
                tuple(_whole(count) for count in counts),
                None if total is None else float(_number(total)),
            )
    for comm, rank, pid in fields["ranks"]:
        if (procfs / str(_whole(pid))).is_dir():
            totals.pids[str(comm), str(rank)] = pid
    for comm, rank, count in fields.get("positions", ()):  # not of every version
        totals.positions[str(comm), str(rank)] = _whole(count)
    if left_out:
        _log.warning("totals of another version that start at 0: %s", ", ".join(sorted(left_out)))
    return totals


def _is_known(name: str, labels: Any, kind: str) -> bool:
    """Whether this version has such a metric; a series may have one label more, its namespace's."""
    metric = _CONTINUED.get(name)
    return metric is not None and metric.kind == kind and len(labels) - len(metric.labels) in (0, 1)


def _labels(labels: Any) -> LabelValues:
    if not isinstance(labels, list) or not all(one is None or isinstance(one, str) for one in labels):
        raise TypeError(labels)
    return tuple(labels)


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(value)
    return value


def _whole(value: Any) -> int:
    number = _number(value)
    if not isinstance(number, int):
        raise TypeError(value)
    return number
