"""What one user does to the agent, and what the others must not notice of it: programs, and a job beside them.

Programs run as a user without rights.  They are built when a test asks for them.
"""

from __future__ import annotations

import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from tests.fabric.agent_process import AgentProcess

HERE: Final = Path(__file__).parent
UID: Final = 5000
"""Whoever attacks: a number that no user of this machine has."""
_SYMBOL: Final = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


def compiled(source: str, target: Path, *options: str) -> Path:
    """A program or library of this folder's sources."""
    command = ["gcc", "-g", "-O0", "-fcf-protection=none", "-o", str(target), str(HERE / source), *options]
    subprocess.run(command, check=True, capture_output=True)
    target.chmod(0o755)
    return target


@contextmanager
def as_user(*command: str | Path, told: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A program of the attacker's, until the block ends; `told`: wait until it says that it has begun."""
    line = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *map(str, command)]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        try:
            if told:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def own(*files: Path) -> Sequence[Path]:
    """The files, given to the attacker."""
    for file in files:
        os.chown(file, UID, UID)
    return files


def endless_symbols(path: Path, count: int) -> Path:
    """A library without dynamic symbols whose symbol table names one of NCCL's functions `count` times."""
    name = b"ncclGetUniqueId"
    strings, section_names = b"\0" + name + b"\0", b"\0.text\0.symtab\0.strtab\0.shstrtab\0"
    code_at, table_at = 0x1000, 0x2000
    strings_at = table_at + count * _SYMBOL.itemsize
    names_at = strings_at + len(strings)
    headers_at = (names_at + len(section_names) + 7) & ~7
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01" + bytes(9), 3, 62, 1, 0, 64, headers_at, 0, 64, 56, 1, 64, 5, 4
    )
    with path.open("wb") as file:
        file.write(header + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0x2000, 0x2000, 0x1000))
        file.seek(code_at)
        file.write(b"\x55" + b"\xc3" * 4095)
        for first in range(0, count, 1 << 16):
            block = np.zeros(min(1 << 16, count - first), _SYMBOL)
            block["name"], block["info"], block["section"], block["size"] = 1, 0x12, 1, 16
            block["value"] = code_at + (np.arange(first, first + len(block)) % 4000)
            file.write(block.tobytes())
        file.write(strings + section_names)
        file.seek(headers_at)
        for row in (
            (0, 0, 0, 0, 0, 0, 0),
            (1, 1, 6, code_at, code_at, 4096, 0),
            (7, 2, 0, 0, table_at, count * _SYMBOL.itemsize, 3),
            (15, 3, 0, 0, strings_at, len(strings), 0),
            (23, 3, 0, 0, names_at, len(section_names), 0),
        ):
            kind = struct.pack("<IIQQQQIIQQ", *row, 0, 8, 0)
            file.write(kind)
    return path


def costly_debug_information(folder: Path, copies: int, structures: int = 9000) -> list[Path]:
    """Libraries with NCCL's functions and a megabyte of debug information that tells nothing of communicators."""
    source = folder / "costly.c"
    source.write_text(
        "int ncclAllReduce(void *a, void *b, unsigned long n, int t, int o, void *c, void *s) { return 0; }\n"
        + "".join(
            f"struct s{at}{{int a{at};char b{at}[{at % 7 + 1}];struct s{max(at - 1, 0)}*p;}};struct s{at} v{at};\n"
            for at in range(structures)
        )
    )
    library = folder / "costly.so"
    command = [
        "gcc",
        "-g",
        "-O0",
        "-fcf-protection=none",
        "-shared",
        "-fPIC",
        "-Wl,--build-id=none",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return copies_of(library, folder, copies)


def copies_of(library: Path, folder: Path, number: int) -> list[Path]:
    """Copies of a library, each with other bytes at its end."""
    content, files = library.read_bytes(), []
    for at in range(number):
        file = folder / f"copy{at}.so"
        file.write_bytes(content + at.to_bytes(4, "little"))
        file.chmod(0o755)
        files.append(file)
    return files


@dataclass(slots=True)
class Watched:
    """How an agent fared."""

    longest_scrape_s: float = 0.0
    """Without the time in which the agent had no processor, as other tests had them."""
    longest_health_s: float = 0.0
    """Likewise."""
    most_bytes: int = 0
    """Memory of the agent and all its processes, each page counted once among those that share it."""
    failures: list[str] = field(default_factory=list)


@contextmanager
def watching(agent: AgentProcess) -> Iterator[Watched]:
    """Ask an agent for its pages, and look at its memory, several times a second until the block ends."""
    watched, over = Watched(), threading.Event()

    def ask(path: str) -> float:
        began, waited = time.monotonic(), _waited_seconds(agent.process.pid)
        try:
            agent.page(path)
        except OSError as error:
            watched.failures.append(f"{path}: {error}")
        return time.monotonic() - began - max(0.0, _waited_seconds(agent.process.pid) - waited)

    def watch() -> None:
        while not over.wait(0.2):
            watched.longest_health_s = max(watched.longest_health_s, ask("/healthz"))
            watched.longest_scrape_s = max(watched.longest_scrape_s, ask("/metrics"))
            watched.most_bytes = max(watched.most_bytes, _memory_bytes(agent.process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield watched
    finally:
        over.set()
        thread.join()


def _waited_seconds(pid: int) -> float:
    """For how long the threads of a process, together, were ready to run and had no processor (proc_pid_schedstat)."""
    waited_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended meanwhile
            waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9


def _memory_bytes(pid: int) -> int:
    total = 0
    for one in _family(pid):
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _family(pid: int) -> list[int]:
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    except OSError:
        pass  # it has ended meanwhile
    return found
