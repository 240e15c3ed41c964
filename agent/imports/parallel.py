"""Maps a function over blocks of input on all processors, in their order, with few blocks in memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Final, Self, TypeVar

from railscope.agent.imports.facts import ImportFailure
from railscope.agent.imports.progress import Progress

WORTH_BYTES: Final = 1 << 25
"""Of less input, processes of their own take longer than they save."""
_LOOK_S: Final = 0.5
"""How often to show progress."""
_PR_SET_PDEATHSIG: Final = 1
_AHEAD: Final = 2
"""Blocks under way for each process."""

_Block = TypeVar("_Block")
_Result = TypeVar("_Result")


class Workers(AbstractContextManager["Workers"]):
    """Processes that work on blocks; none at all where there is one processor, or little to do."""

    def __init__(self, size_bytes: int, progress: Progress, processors: int | None = None) -> None:
        """`size_bytes`: of all input; `processors` None: those that this process may run on."""
        self._progress = progress
        count = len(os.sched_getaffinity(0)) if processors is None else processors
        self._count = count if count > 1 and size_bytes >= WORTH_BYTES else 0
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.stop()
        elif self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """End the processes, whatever they do: from then on they write nothing."""
        if self._pool is None:
            return
        for one in multiprocessing.active_children():
            one.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool, self._count = None, 0

    @property
    def count(self) -> int:
        """How many processes; 0: this one does it all."""
        return self._count

    def map(self, work: Callable[[_Block], _Result], blocks: Iterable[_Block]) -> Iterator[_Result]:
        """The results in the order of the blocks; `work` is a function of a module.

        Raises:
            ImportFailure: a process was killed.
        """
        if not self._count:
            yield from map(work, blocks)
            return
        if self._pool is None:
            # A fork would take locks with it that threads of pyarrow hold.
            context = multiprocessing.get_context("spawn")
            counter = context.Value("q", 0)
            # Without its lock, with which a process may have been killed: it is one word.
            count = counter.get_obj()
            self._progress.others = lambda: count.value
            self._pool = ProcessPoolExecutor(self._count, context, _begin_process, (counter,))
        under_way: deque[Future[_Result]] = deque()
        try:
            for block in blocks:
                under_way.append(self._pool.submit(work, block))
                if len(under_way) > _AHEAD * self._count:
                    yield self._result(under_way.popleft())
            while under_way:
                yield self._result(under_way.popleft())
        except BrokenProcessPool:
            raise ImportFailure(
                "one of the processes that read the files was killed, perhaps for want of memory: try again with fewer "
                "processors (taskset -c 0 railscope import …)"
            ) from None
        finally:
            for one in under_way:
                one.cancel()

    def _result(self, future: Future[_Result]) -> _Result:
        while not wait([future], _LOOK_S).done:
            self._progress.show()
        return future.result()


_counters: Final[list[Synchronized[int]]] = []
"""Of a process of `Workers`: the number that all of them add to."""


def _begin_process(counter: Synchronized[int]) -> None:
    # Ctrl-C reaches all processes of a terminal, and the one that began these ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    _counters.append(counter)


def count_bytes(size_bytes: int) -> None:
    """Count bytes that a process of `Workers` has read."""
    for counter in _counters:
        with counter.get_lock():
            counter.value += size_bytes
