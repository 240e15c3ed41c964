"""A process that has an NCCL library loaded and makes the calls that a test tells it to.

Every argument travels as a 64-bit word, so the upper half of an `int` argument may be garbage, as it may be in C.
Communicators are forged: zeroed memory of the right size is one that NCCL refuses, and with both magics, the identity
and pointers to somewhere it is one that NCCL asks for its rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

MAGIC: Final = 0x0280028002800280

_CHILD: Final = """
import ctypes, mmap, os, sys, threading
library = ctypes.CDLL(sys.argv[1])
for user in map(int, sys.argv[2:]):
    os.setgid(user)
    os.setuid(user)
kept = []
def call(name, times, *words):
    function = library[name]
    arguments = [ctypes.c_uint64(word) for word in words]
    for _ in range(times):
        result = function(*arguments)
    return result
def call_at(address, times, *words):
    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * len(words))(address)
    for _ in range(times):
        result = function(*words)
    return result
def call_from_threads(name, threads, times, *words):
    barrier = threading.Barrier(threads)
    def work():
        barrier.wait()
        call(name, times, *words)
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
started = []
def start(name, *words):
    started.append(threading.Thread(target=call, args=(name, 1, *words)))
    started[-1].start()
def finish():
    while started:
        started.pop().join()
def call_from_fork(name, times, *words):
    child = os.fork()
    if not child:
        call(name, times, *words)
        os._exit(0)
    return os.waitpid(child, 0)[1]
def sweep(name, position, values, *words):
    for value in range(values):
        call(name, 1, *words[:position], value, *words[position + 1 :])
def sweep_from_fork(*words):
    child = os.fork()
    if not child:
        sweep(*words)
        os._exit(0)
    return os.waitpid(child, 0)[1]
def unshare(flags):
    return ctypes.CDLL(None).unshare(flags)
def nest():
    user, group = os.geteuid(), os.getegid()
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its files of /proc are its own again
    assert unshare(0x10000000) == 0
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
def become(user):
    os.setgid(user)
    os.setuid(user)
def memory(size, word=0):
    block = ctypes.create_string_buffer(size)
    if word:
        ctypes.memmove(block, word.to_bytes(8, "little") * (size // 8), size // 8 * 8)
    kept.append(block)
    return ctypes.addressof(block)
def pages(size):
    kept.append(mmap.mmap(-1, size))
    return ctypes.addressof(ctypes.c_char.from_buffer(kept[-1]))
def show(address, size, visible):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 3 if visible else 0) == 0
def store(address, value, size):
    ctypes.memmove(address, (value % (1 << 8 * size)).to_bytes(size, "little"), size)
def load(path):
    kept.append(ctypes.CDLL(path))
def new_communicator():
    handle = ctypes.c_void_p()
    assert library.ncclCommInitAll(ctypes.byref(handle), 1, None) == 0
    return handle.value
print("ready", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Caller:
    """The process lives as long as the `with` block."""

    def __init__(self, library: Path, *, user: int | None = None) -> None:
        """`user`: the uid that it runs as; None: this process's."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(library), *([str(user)] if user is not None else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "NCCL_SOCKET_IFNAME": "lo"},
            text=True,
        )
        self.pid = self._process.pid
        assert self._answer() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        """Kill it now, in whatever call its threads are."""
        self._process.kill()
        self._process.wait()

    def call(self, name: str, times: int, *words: int) -> int:
        """Call a function so often with these arguments; returns its last result."""
        return int(self._ask(f"call({name!r}, {times}, {', '.join(map(str, words))})"))

    def call_at(self, address: int, times: int, *words: int) -> int:
        """Call what the library does not export; returns the last result."""
        return int(self._ask(f"call_at({address}, {times}, {', '.join(map(str, words))})"))

    def call_from_threads(self, name: str, threads: int, times: int, *words: int) -> None:
        """Call a function from several threads at once, so often from each."""
        self._ask(f"call_from_threads({name!r}, {threads}, {times}, {', '.join(map(str, words))})")

    def start(self, name: str, *words: int) -> None:
        """Call a function from another thread, which may stay in it."""
        self._ask(f"start({name!r}, {', '.join(map(str, words))})")

    def finish(self) -> None:
        """Wait for the calls that were started."""
        self._ask("finish()")

    def call_from_fork(self, name: str, times: int, *words: int) -> int:
        """Call a function so often from a process that this one forks; returns its wait status."""
        return int(self._ask(f"call_from_fork({name!r}, {times}, {', '.join(map(str, words))})"))

    def sweep(self, name: str, position: int, values: int, *words: int) -> None:
        """Call a function once for each of the `values` first numbers as the argument at `position`."""
        self._ask(f"sweep({name!r}, {position}, {values}, {', '.join(map(str, words))})")

    def sweep_from_fork(self, name: str, position: int, values: int, *words: int) -> int:
        """As `sweep`, from a process that this one forks; returns its wait status."""
        return int(self._ask(f"sweep_from_fork({name!r}, {position}, {values}, {', '.join(map(str, words))})"))

    def unshare(self, flags: int) -> int:
        """unshare(2)."""
        return int(self._ask(f"unshare({flags})"))

    def nest(self) -> None:
        """Enter a user namespace below its own, in which it keeps its number."""
        self._ask("nest()")

    def become(self, user: int) -> None:
        """Take another uid, as its user namespace numbers them."""
        self._ask(f"become({user})")

    def memory(self, size_bytes: int, word: int = 0) -> int:
        """Address of fresh memory that is full of one 64-bit word."""
        return int(self._ask(f"memory({size_bytes}, {word})"))

    def pages(self, size_bytes: int) -> int:
        """Address of whole pages of zeros."""
        return int(self._ask(f"pages({size_bytes})"))

    def show(self, address: int, size_bytes: int, *, visible: bool) -> None:
        """Let whole pages be read, or not, as when they are swapped out."""
        self._ask(f"show({address}, {size_bytes}, {visible})")

    def store(self, address: int, value: int, size_bytes: int) -> None:
        self._ask(f"store({address}, {value}, {size_bytes})")

    def load(self, library: Path) -> None:
        """Map one more library."""
        self._ask(f"load({str(library)!r})")

    def new_communicator(self) -> int:
        """Address of a real communicator of one rank (testbed library only)."""
        return int(self._ask("new_communicator()"))

    def execute_again(self, **environment: str) -> None:
        """Execute the same program with more in its environment: the process stays, its memory goes."""
        changed = f"os.execve(sys.executable, sys.orig_argv, {{**os.environ, **{environment!r}}})"
        assert self._ask(changed) == "ready"

    def text(self, address: int, size_bytes: int) -> bytes:
        """Bytes of the process's memory."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size_bytes)

    def address_of(self, library: Path, file_offset: int) -> int:
        """Where a byte of the library's code is mapped."""
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == str(library.resolve()) and "x" in fields[1]:
                start, end = (int(part, 16) for part in fields[0].split("-"))
                offset = int(fields[2], 16)
                if offset <= file_offset < offset + end - start:
                    return start + file_offset - offset
        raise AssertionError(f"{library} is not mapped at file offset {file_offset:#x}")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, "the calling process ended"
        return answer.strip()


def forge_communicator(caller: Caller, layout: Any, size_bytes: int, identity: Mapping[str, int]) -> int:
    """Address of memory that NCCL takes for a live communicator; `identity` by the layout's field names."""
    # NCCL follows pointers, to the abort flag for one: they lead to zeros.
    address = caller.memory(size_bytes, word=caller.memory(1 << 16))
    for field in ("start_magic", "end_magic"):
        if getattr(layout, field) is not None:  # none before 2.21
            caller.store(address + getattr(layout, field), MAGIC, 8)
    for field, value in {"async_result": 0, **identity}.items():
        caller.store(address + getattr(layout, field), value, 8 if field in ("comm_hash", "bus_id") else 4)
    return address
