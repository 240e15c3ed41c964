"""The probed program of the bench: one process and one private copy of its library for each way of probing it.

A library of its own (another inode) keeps every variant attached all the time without touching the others, so that
rounds can alternate between them in tens of milliseconds.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points

_SOURCES: Final = Path(__file__).resolve().parent
_HEADERS: Final = _SOURCES.parent.parent / "probes" / "bpf"
_FLAGS: Final = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer", "-fPIC")
_BPF_MACHINES: Final = {"x86_64": "x86", "aarch64": "arm64"}


class BenchError(RuntimeError):
    """The bench cannot go on; one line says why."""


@dataclass(frozen=True, slots=True)
class Built:
    """What was compiled."""

    library: Path
    """Exports ncclAllReduce alone."""
    info_library: Path
    """Has ncclEnqueueCheck behind it."""
    loop: Path
    empty_object: Path
    producer_object: Path
    """Writes events into a ring when it is told to."""


def build(directory: Path) -> Built:
    """Compile the target, its caller and the BPF programs of the bench into `directory`.

    Raises:
        BenchError: with the compiler's complaint.
    """
    built = Built(
        library=directory / "libtarget.so",
        info_library=directory / "libtarget-info.so",
        loop=directory / "target-loop",
        empty_object=directory / "empty.bpf.o",
        producer_object=directory / "producer.bpf.o",
    )
    plain = ["-fcf-protection=none"] if platform.machine() == "x86_64" else []
    shared = ("gcc", *_FLAGS, *plain, "-shared", str(_SOURCES / "target.c"), "-o")
    _compile(*shared, str(built.library))
    _compile(*shared, str(built.info_library), "-DTHROUGH_ENQUEUE_CHECK")
    _compile("gcc", *_FLAGS, str(_SOURCES / "target_loop.c"), "-ldl", "-o", str(built.loop))
    multiarch = _compile("gcc", "-print-multiarch").strip()
    sources = {_HEADERS / "empty.bpf.c": built.empty_object, _SOURCES / "producer.bpf.c": built.producer_object}
    for source, compiled in sources.items():
        _compile(
            *("clang", "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-target", "bpf", "-mcpu=v3"),
            *(f"-I/usr/include/{multiarch}", f"-D__TARGET_ARCH_{_BPF_MACHINES[platform.machine()]}"),
            *(f"-I{_HEADERS}", "-c", str(source), "-o", str(compiled)),
        )
    return built


class Target:
    """A running process that calls the function of its own copy of the library."""

    def __init__(self, built: Built, name: str, *, through_info: bool = False) -> None:
        """Raises BenchError when the process does not start."""
        self.library = built.library.with_name(f"libtarget-{name}.so")
        self._through_info = through_info
        shutil.copyfile(built.info_library if through_info else built.library, self.library)
        self._process = subprocess.Popen(
            [str(built.loop), str(self.library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._line() != "ready":
            self.close()
            raise BenchError("the bench's target does not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def points(self) -> ProbePoints:
        """Where to probe the copy.

        Raises:
            BenchError: the function that is meant is not among them.
        """
        with self.library.open("rb") as file, Elf.open(file.fileno()) as elf:
            points = probe_points(elf, 0)
        if points.through_enqueue_check is not self._through_info or not points.calls:
            raise BenchError(f"the compiler did not begin the target's function as the bench needs it: {points}")
        return points

    def start(self, calls: int) -> None:
        """Let it make `calls` calls as fast as it can, and go on here."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()

    def finish(self) -> int:
        """Wait for the calls of `start`; returns the CPU time they took, ns."""
        return int(self._line())

    def call(self, calls: int) -> float:
        """Make `calls` calls; returns ns of CPU time per call."""
        self.start(calls)
        return self.finish() / calls

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def compile_with(source: str, *options: str) -> None:
    """Compile C whose functions begin with a push, as those of libraries do that are probed.

    Raises:
        BenchError: with the compiler's complaint.
    """
    plain = ["-fcf-protection=none"] if platform.machine() == "x86_64" else []
    _compile("gcc", *_FLAGS, *plain, source, *options)


def _compile(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be run ({error.strerror}): run 'make setup'") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
