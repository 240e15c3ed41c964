"""Open questions that only an experiment answers.

1. Can memory of the host that CUDA allocated be read from outside, and how?
2. NCCL's kernels stamp their begin and end (globaltimer, ns) into such memory while a profiler has asked for it: are
   the stamps there, what do they say beside CUDA's events, and what do they cost?
3. Do probes on the CUDA driver's own library meet its calls?
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading import libbpf
from railscope.probes.loading.libbpf import ARCHITECTURES, OBJECTS
from railscope.probes.loading.links import AttachKind, Links, ProbePoint, plain_attach_type
from railscope.probes.nccl.functions.prologue import PROLOGUE_BYTES, probe_offset
from railscope.probes.processes.processes import PROCFS, executable_mappings, open_mapped_file
from tests.bench.run_times import counted, run_times
from tests.gpu.lane import Lane
from tests.gpu.rails import TwoHosts, two_hosts
from tests.gpu.ranks import Ranks
from tests.gpu.table import Verdict

_CONTENT: Final = bytes(range(256)) * 16
_ASKED: Final = 200
_TIMED: Final = 100
_PAYLOAD_BYTES: Final = 1 << 20
_CHANNELS: Final = 64
_STAMPS: Final = 64
"""For each channel, the last of its works (MAX_PROFILER_EVENTS_PER_CHANNEL)."""
_STAMP: Final = struct.Struct("<QQ")
"""Number of the work, and when, ns."""


class IoVector(ctypes.Structure):
    """struct iovec of process_vm_readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def run(lane: Lane) -> None:
    with two_hosts() as two, lane.ranks(two, "plain") as ranks:
        ranks.join()
        with lane.attempt("memory from cudaHostAlloc"):
            _pinned(lane, ranks)
        plain_us = _timed_us(ranks)
        with lane.attempt("stamps of kernels"):
            _stamps(lane, two, plain_us)
        for library in ("libcuda.so", "libcudart.so"):
            with lane.attempt(f"probes of {library}"):
                _probes(lane, ranks, library)
        with lane.attempt("what the job asks of CUDA"):
            _proved(lane, ranks)


def _pinned(lane: Lane, ranks: Ranks) -> None:
    address = ranks.ask("pinned", content=_CONTENT.hex())[0]
    pid = ranks.pids[0]
    region = _region(pid, address)
    lane.rows.add("memory from cudaHostAlloc is a mapping of", region, verdict=Verdict.SEEN)
    for how, read in (("/proc/PID/mem", read_mem), ("process_vm_readv", read_vm)):
        what = f"memory from cudaHostAlloc, read by {how}"
        try:
            content = read(pid, address, len(_CONTENT))
        except OSError as error:
            lane.rows.add(what, f"{error.strerror}", verdict=Verdict.SEEN)
        else:
            lane.rows.add(what, "the content" if content == _CONTENT else "something else", verdict=Verdict.SEEN)


def read_mem(pid: int, address: int, size_bytes: int) -> bytes:
    """Read another process's memory through procfs.

    Raises:
        OSError: the kernel refuses, or has less.
    """
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        content = os.pread(memory.fileno(), size_bytes, address)
    if len(content) != size_bytes:
        raise OSError(0, f"{len(content)} of {size_bytes} bytes")
    return content


def read_vm(pid: int, address: int, size_bytes: int) -> bytes:
    """The same by process_vm_readv(2).

    Raises:
        OSError: the kernel refuses, or has less.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    into = ctypes.create_string_buffer(size_bytes)
    local, remote = IoVector(ctypes.addressof(into), size_bytes), IoVector(address, size_bytes)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    got = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if got != size_bytes:
        number = ctypes.get_errno() if got < 0 else 0
        raise OSError(number, os.strerror(number) if got < 0 else f"{got} of {size_bytes} bytes")
    return into.raw


def _region(pid: int, address: int) -> str:
    """What /proc/PID/smaps calls the mapping: its file and its flags."""
    name = flags = "unknown"
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(maxsplit=5)
        if "-" in first[0] and not first[0].endswith(":"):
            begin, end = (int(part, 16) for part in first[0].split("-"))
            inside = begin <= address < end
            name = (first[5] if len(first) > 5 else "no file") if inside else name
        elif inside and first[0] == "VmFlags:":
            flags = " ".join(line.split()[1:])
    return f"{name}; {flags}"


def _timed_us(ranks: Ranks) -> list[float]:
    ranks.ask("timed", operation="AllReduce", payload_bytes=_PAYLOAD_BYTES, times=5)
    took = ranks.ask("timed", operation="AllReduce", payload_bytes=_PAYLOAD_BYTES, times=_TIMED)[0]
    return [float(each) * 1e3 for each in took]


@dataclass(frozen=True, slots=True)
class _Stamps:
    started: dict[tuple[int, int], int]
    """By channel and number of the work: ns by the GPU's clock."""
    completed: dict[tuple[int, int], int]


def _stamps(lane: Lane, two: TwoHosts, plain_us: list[float]) -> None:
    where: dict[str, Any] = json.loads((lane.kit / "stamps/offsets.json").read_text())
    plugin = lane.kit / "stamps/libnccl-profiler-stamps.so"
    with lane.ranks(two, "stamped", environment={"NCCL_PROFILER_PLUGIN": str(plugin)}, port_offset=1) as ranks:
        ranks.join()
        own = ranks.ask("identity")[0]
        stamped_us = _timed_us(ranks)
        ratio = median(stamped_us) / median(plain_us)
        text = f"{ratio:.3f} ({median(stamped_us):.0f} of {median(plain_us):.0f} µs)"
        lane.rows.figure("1 MiB AllReduce with stamps over without", ratio, text)
        what = "stamps of kernels"
        if own["nccl_version"] != where["nccl_version"] or not own["communicator"]:
            wanted, version, at = where["nccl_version"], own["nccl_version"], own["communicator"]
            lane.rows.add(what, f"the kit knows NCCL {wanted}, this is {version} at {at:#x}", verdict=Verdict.ABSENT)
            return

        def peek(_pid: int, address: int, size_bytes: int) -> bytes:
            return bytes.fromhex(ranks.ask("peek", rank=0, address=address, size_bytes=size_bytes)[0])

        rank = struct.unpack("<i", peek(0, own["communicator"] + where["offsets"]["rank"], 4))[0]
        if rank != 0:
            lane.rows.add(what, f"rank 0 reads as {rank}: the layout is another one", verdict=Verdict.FAILED)
            return
        for how, read in (("by the rank itself", peek), ("from outside", read_mem)):
            try:
                found = _read_stamps(ranks.pids[0], own["communicator"], where, read)
            except OSError as error:
                lane.rows.add(f"{what}, read {how}", f"cannot be read: {error.strerror}")
                continue
            text = f"{len(found.started)} begun, {len(found.completed)} ended"
            lane.rows.figure(f"{what}, read {how}", len(found.completed), text)
            _compare(lane, found, stamped_us, how)


def _compare(lane: Lane, found: _Stamps, truth_us: list[float], how: str) -> None:
    """Kernel times by their stamps, beside CUDA's events around the same operations, the last ones."""
    what = f"kernel's time by its stamps, read {how}, over CUDA's events"
    works = sorted({number for _, number in found.completed})[-_STAMPS:]
    took = []
    for number in works:
        began = [at for (_, each), at in found.started.items() if each == number]
        ended = [at for (_, each), at in found.completed.items() if each == number]
        if began and ended:
            took.append((max(ended) - min(began)) / 1e3)
    if not took:
        lane.rows.add(what, "no stamps", verdict=Verdict.ABSENT)
        return
    truth = truth_us[-len(took) :]
    ratio = median(took) / median(truth)
    text = f"{ratio:.3f} ({median(took):.0f} of {median(truth):.0f} µs; {len(took)} operations)"
    lane.rows.figure(what, ratio, text)


def _read_stamps(pid: int, communicator: int, where: dict[str, Any], read: Callable[[int, int, int], bytes]) -> _Stamps:
    offsets = where["offsets"]
    tables: list[dict[tuple[int, int], int]] = []
    for field in ("profiler.workStarted", "profiler.workCompleted"):
        (table,) = struct.unpack("<Q", read(pid, communicator + offsets[field], 8))
        stamps: dict[tuple[int, int], int] = {}
        size = where["channel_bytes"]
        content = read(pid, table, _CHANNELS * size)
        for channel in range(_CHANNELS):
            for number, when in _STAMP.iter_unpack(content[channel * size : channel * size + _STAMPS * _STAMP.size]):
                if number:
                    stamps[channel, number] = when
        tables.append(stamps)
    return _Stamps(*tables)


def _probes(lane: Lane, ranks: Ranks, library: str) -> None:
    """Whether the job's calls meet probes on CUDA's own libraries: the driver's and, to hold it against, the runtime's.

    A runtime need not call the driver by its exported functions, so none is an answer, too.
    """
    mapped = next(
        (one for one in executable_mappings(PROCFS, ranks.pids[0]) if Path(one.path).name.startswith(library)), None
    )
    if mapped is None:
        lane.rows.add(f"probes of {library}", "it is not mapped", verdict=Verdict.ABSENT)
        return
    prefix = "cuda" if library == "libcudart.so" else "cu"
    also = "" if lane.simulated else "; PyTorch's watchdog asks, too"
    descriptor = open_mapped_file(PROCFS, ranks.pids[0], mapped)
    try:
        with Elf.open(descriptor) as elf:
            for call, ask in _CALLS.items():
                function = prefix + call
                what = f"{library}: probe of {function}"
                symbol = elf.symbols((function,)).get(function)
                if symbol is None:
                    lane.rows.add(what, "not exported", verdict=Verdict.ABSENT)
                    continue
                where = probe_offset(elf.read_at(symbol.file_offset, PROLOGUE_BYTES), elf.machine)
                at = symbol.file_offset + (where.skip_bytes if where else 0)
                hits, made = _hits(ranks, f"/proc/self/fd/{descriptor}", at, ask)
                stepped = "" if where else ", single-stepped"
                text = f"{hits} hits where the job called {made}{stepped}{also if call == 'EventQuery' else ''}"
                lane.rows.figure(what, hits, text)
    finally:
        os.close(descriptor)


def _hits(ranks: Ranks, path: str, file_offset: int, ask: Callable[[Ranks], int]) -> tuple[int, int]:
    """How often a probe that does nothing is met by rank 0 meanwhile, and how often that rank says that it called."""
    architecture = ARCHITECTURES[platform.machine()]
    links = Links()
    loaded = libbpf.load(
        OBJECTS / f"empty.{architecture}.bpf.o",
        attach_types={"empty": plain_attach_type(AttachKind.PERF)},
        map_entries={},
    )
    try:
        with counted():
            point = ProbePoint("driver", file_offset, 0)
            links.attach(AttachKind.PERF, loaded.program_fds["empty"], path, (point,), pid=ranks.pids[0])
            made = ask(ranks)
            return run_times(os.getpid())["empty"].runs, made
    finally:
        links.close()
        loaded.close()


def _ask_for(function: str) -> Callable[[Ranks], int]:
    return lambda ranks: int(ranks.ask("ask", times=_ASKED)[0][function])


def _replay(ranks: Ranks) -> int:
    ranks.ask("graph", payload_bytes=4096, replays=_ASKED)
    return _ASKED


_CALLS: Final[Mapping[str, Callable[[Ranks], int]]] = {
    "EventQuery": _ask_for("cuEventQuery"),
    "StreamSynchronize": _ask_for("cuStreamSynchronize"),
    "GraphLaunch": _replay,
}
"""Functions, less their prefix, and how the job is made to call each, so often as the answer says."""


def _proved(lane: Lane, ranks: Ranks) -> None:
    """What an agent at the highest level learns from what the job asks."""
    with lane.agent("driver", "--level", "all", *ranks.pid_options) as agent:

        def watched() -> list[str]:
            log = (lane.folder / "agent-driver.log").read_text(errors="replace").splitlines()
            return [line.partition("msg=")[2].strip('"') for line in log if "functions of CUDA" in line]

        def proved() -> float:
            durations = "railscope_collective_duration_seconds_count"
            return sum(value for _, value in agent.samples(durations, source="cuda"))

        agent.comes_true(lambda: bool(watched()), 5)
        ranks.ask("ask", times=_ASKED)
        agent.comes_true(lambda: proved() >= 2 * _ASKED, 5)
        lane.rows.add("CUDA is watched: the agent", "; ".join(watched()) or "says nothing")
        text = f"{proved():.0f} of {2 * _ASKED} operations"
        lane.rows.figure("proved complete by what the job asks of CUDA", proved(), text)
