"""Reads counters periodically in a native thread without the interpreter, and queues the answers.

A thread of Python's is late whenever another one computes, and pays for every waking with the interpreter's lock.  The
thread here runs compiled code (probes/native/beats.c) from its beginning to its end: it asks what a `Question` says,
keeps the answers with the times before and after, and counts the beats that it missed.  Python comes a few times a
second and takes many answers at once.  Whatever is not an answer as usual ends a question; its source then reads as
it always can, and says what is wrong.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from railscope.probes.installation import remedy_for_missing_file

_log = logging.getLogger("railscope.beats")

LIBRARY: Final = Path(__file__).resolve().parent / f"beats.{platform.machine()}.so"
"""Compiled by `make build`, one a kind of machine."""

_SLOT: Final = np.dtype(
    [("due_ns", "=u8"), ("before_ns", "=u8"), ("after_ns", "=u8"), ("bytes", "=u4"), ("reserved", "=u4")]
)
"""The head of `struct slot` in beats.c."""
_SPARE_BYTES: Final = 2048
"""Room for what an answer may be longer than the last one: eight devices more."""


@dataclass(frozen=True, slots=True, eq=False)
class TableQuestion:
    """A netlink table that fits one datagram: what is sent, and where."""

    descriptor: int
    """A netlink socket of its own."""
    request: bytes
    """With header; at most 64 bytes."""
    answer_bytes: int
    """How long the last answer was."""


@dataclass(frozen=True, slots=True, eq=False)
class FilesQuestion:
    """Files that show a number of at most 19 digits each, with a line feed behind it."""

    descriptors: tuple[int, ...]


Question = TableQuestion | FilesQuestion


class Answer(NamedTuple):
    """The kernel's raw answer at one moment.  A tuple, because it is the fastest to make."""

    before_ns: int
    """Monotonic times, as in `CounterReading`."""
    after_ns: int
    datagrams: Sequence[bytes | memoryview]
    """Or the numbers of files as one `b"|12\\n|345\\n|"`."""
    due_ns: int = 0
    """When it was to be asked; 0: just then."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What came since it was asked for last."""

    answers: list[Answer]
    missed: int
    """Beats that were too late, or whose answer found no room."""
    spared: int
    """Beats that were left out as asking takes long."""
    due_ns: int
    """When it is asked next."""
    ended: bool
    """Whether the answer was another one than usual: it is not asked any more."""


class _Standing(ctypes.Structure):
    """`struct standing` in beats.c."""

    _fields_ = (
        ("written", ctypes.c_uint64),
        ("missed", ctypes.c_uint64),
        ("spared", ctypes.c_uint64),
        ("due_ns", ctypes.c_uint64),
        ("ended", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class BeatThread:
    """The thread; several questions, each with a period of its own."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        """Starts the thread of this `struct beats`."""
        self._library = library
        self._beats = address
        self._process = os.getpid()
        self._thread = threading.Thread(target=library.beats_run, args=(self._beats,), name="beats", daemon=True)
        self._thread.start()

    @property
    def address(self) -> int:
        """Of `struct beats`."""
        return self._beats

    def hangs(self, now_ns: int, patience_ns: int) -> bool:
        """Whether it waits for an answer for longer than this: whatever else is to be asked waits too."""
        since_ns: int = self._library.beats_asking_since(self._beats)
        return since_ns != 0 and now_ns - since_ns > patience_ns

    def wait(self, until_ns: int | None) -> None:
        """Wait until then, None: for ever, or until a question ends or `wake` is called.  For one thread only."""
        self._library.beats_wait(self._beats, until_ns or 0)

    def wake(self) -> None:
        """Wake the waiting thread."""
        self._library.beats_ring_bell(self._beats)

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    def ask(self, question: Question, period_ns: int, due_ns: int, slots: int) -> Asked:
        """Ask from `due_ns` on, once a period; `slots` answers are queued before beats are missed.

        Raises:
            OSError: there is no memory, or the request is too long.
        """
        if isinstance(question, TableQuestion):
            handle = self._library.beats_ask_netlink(
                self._beats,
                question.descriptor,
                question.request,
                len(question.request),
                question.answer_bytes + _SPARE_BYTES,
                period_ns,
                due_ns,
                slots,
            )
        else:
            files = (ctypes.c_int * len(question.descriptors))(*question.descriptors)
            handle = self._library.beats_ask_files(self._beats, files, len(files), period_ns, due_ns, slots)
        if not handle:
            number = ctypes.get_errno()
            raise OSError(number, f"a counter cannot be asked for: {os.strerror(number)}")
        return Asked(self, self._library, handle, question, slots)

    def stop(self, patience_seconds: float) -> bool:
        """End the thread; False: a question is not answered yet, and keeps it alive."""
        self._library.beats_stop(self._beats)
        self._thread.join(patience_seconds)
        return not self._thread.is_alive()

    def __del__(self) -> None:
        # In a forked child the thread is not there, but what it waited for still counts it.
        if self._process == os.getpid() and not self._thread.is_alive():
            self._library.beats_free(self._beats)


class Asked:
    """One question that is being asked; one user at a time, and none after `cancel`."""

    def __init__(self, thread: BeatThread, library: ctypes.CDLL, handle: int, question: Question, slots: int) -> None:
        self.question = question
        self._keep_alive = thread
        self._library = library
        self._beats = thread.address
        self._handle = handle
        slot_bytes = ctypes.c_uint32()
        address = library.beats_ring(handle, ctypes.byref(slot_bytes))
        self._slot_bytes = slot_bytes.value
        ring = (ctypes.c_ubyte * (self._slot_bytes * slots)).from_address(address)
        self._ring = memoryview(ring).cast("B")
        self._heads = np.ndarray((slots,), _SLOT, self._ring, strides=(self._slot_bytes,))
        self._slots = slots
        self._taken = self._heard = self._missed = self._spared = 0
        self._standing = _Standing()

    def ended(self) -> bool:
        """Whether it is not asked any more."""
        self._read_standing()
        return bool(self._standing.ended)

    def has_answers(self) -> bool:
        """Whether there is an answer to read, or the question has ended."""
        self._read_standing()
        return self._standing.written > self._taken or bool(self._standing.ended)

    def read_answers(self) -> Heard:
        """Everything that was answered since `release`; its bytes are only there until that is called again."""
        self._read_standing()
        standing = self._standing
        answers = self._answers(standing.written)
        missed, spared = standing.missed - self._missed, standing.spared - self._spared
        self._missed, self._spared = standing.missed, standing.spared
        self._heard = standing.written
        return Heard(answers, missed, spared, standing.due_ns, bool(standing.ended))

    def release(self) -> None:
        """Free the slots of the answers that were read."""
        self._taken = self._heard
        self._library.beats_take(self._handle, self._taken)

    def _answers(self, written: int) -> list[Answer]:
        """Those that were not taken yet."""
        if written == self._taken:
            return []
        places = [number % self._slots for number in range(self._taken, written)]
        heads = self._heads[places].tolist()
        ring, size = self._ring, self._slot_bytes
        answers = []
        for place, (due_ns, before_ns, after_ns, length, _reserved) in zip(places, heads, strict=True):
            begin = place * size + _SLOT.itemsize
            answers.append(Answer(before_ns, after_ns, (ring[begin : begin + length],), due_ns))
        return answers

    def pause(self, patience_ns: int) -> bool:
        """Ask no more for now; False: it is being asked, and is not answered for so long already."""
        return not self._library.beats_pause(self._beats, self._handle, patience_ns)

    def resume(self) -> None:
        self._library.beats_resume(self._beats, self._handle)

    def cancel(self, patience_ns: int) -> bool:
        """Never ask again; False: it still is being asked, and what it reads from must stay open."""
        done = self.pause(patience_ns)
        self._library.beats_end(self._beats, self._handle)
        return done

    def _read_standing(self) -> None:
        self._library.beats_standing(self._beats, self._handle, ctypes.byref(self._standing))


def start_thread() -> BeatThread | None:
    """A native thread that reads counters at a beat; None: there is none on this machine, which the log says once."""
    library = _library()
    address = library.beats_new() if library is not None else None
    if library is None or not address:  # no memory, which others will say
        return None
    try:
        return BeatThread(library, address)
    except RuntimeError as error:  # as many threads as this process may have
        _log.debug("counters are read by Python for now: %s", error)
        return None


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(LIBRARY), use_errno=True)
    except OSError as error:
        costs = "counters are read by Python, which costs more CPU at short periods"
        _log.info("%s: %s: %s", costs, error, remedy_for_missing_file())
        return None
    pointer, size, time = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    netlink = (pointer, ctypes.c_int, ctypes.c_char_p, size, size, time, time, size)
    for name, result, arguments in (
        ("beats_new", pointer, ()),
        ("beats_run", None, (pointer,)),
        ("beats_stop", None, (pointer,)),
        ("beats_free", None, (pointer,)),
        ("beats_ask_netlink", pointer, netlink),
        ("beats_ask_files", pointer, (pointer, ctypes.POINTER(ctypes.c_int), size, time, time, size)),
        ("beats_ring", pointer, (pointer, ctypes.POINTER(size))),
        ("beats_standing", None, (pointer, pointer, ctypes.POINTER(_Standing))),
        ("beats_asking_since", time, (pointer,)),
        ("beats_wait", None, (pointer, time)),
        ("beats_ring_bell", None, (pointer,)),
        ("beats_take", None, (pointer, time)),
        ("beats_pause", ctypes.c_int, (pointer, pointer, time)),
        ("beats_resume", None, (pointer, pointer)),
        ("beats_end", None, (pointer, pointer)),
    ):
        try:
            function = getattr(library, name)
        except AttributeError as error:
            remedy = remedy_for_missing_file()
            _log.warning("counters are read by Python: the library is of another version: %s: %s", error, remedy)
            return None
        function.restype, function.argtypes = result, arguments
    return library
