"""Checks whether probes work on this kernel with these privileges, by attaching them to a function of our own.

The function is a few bytes of machine code in an anonymous file that only this process maps.  Each kind of probe is
loaded, attached to it, hit a few times and read back, so that "works" means calls were counted.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np

from railscope.agent.config.options import Config
from railscope.agent.config.probe_settings import AUTO, attach_kind, enqueue_time, loader
from railscope.agent.doctor.findings import Finding, one_line, privilege_remedy, run_guarded
from railscope.probes.installation import remedy_for_missing_file
from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64
from railscope.probes.libraries.mmap_events import MmapEvents, MmapEventsError
from railscope.probes.loading import bcc_loader
from railscope.probes.loading.bpf_syscall import KernelRefusal, bpf
from railscope.probes.loading.libbpf import ARCHITECTURES, OBJECT_STEMS, IncompleteInstallation, LoadError
from railscope.probes.loading.links import AttachKind, ProbePoint, perf_uprobe_type
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType
from railscope.probes.nccl.functions.entry_points import COLLECTIVE_FUNCTIONS, collective_cookie
from railscope.probes.nccl.functions.probe_points import ProbePoints
from railscope.probes.nccl.programs.calls import EnqueueTime, Loader, NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.stops import Stops

_BPF_MAP_CREATE: Final = 0
_BPF_PROG_LOAD: Final = 5
_BPF_MAP_TYPE_ARRAY: Final = 2
_BPF_MAP_TYPE_RINGBUF: Final = 27
_BPF_PROG_TYPE_KPROBE: Final = 2
_CALL_GET_ATTACH_COOKIE: Final = struct.pack("<BBhi", 0x85, 0, 0, 174)
"""BPF_JMP | BPF_CALL of the helper of that number (include/uapi/linux/bpf.h)."""
_EXIT: Final = struct.pack("<BBhi", 0x95, 0, 0, 0)
_MFD_EXEC: Final = 0x10

_FUNCTION_AT: Final = 64
_RETURN_ZERO: Final = {
    # push %rbp; xor %eax,%eax; pop %rbp; ret: the kernel emulates the push instead of single-stepping it.
    "x86_64": (EM_X86_64, bytes.fromhex("5531c05dc3")),
    # mov w0, #0; ret
    "aarch64": (EM_AARCH64, bytes.fromhex("00008052c0035fd6")),
}
_COMMUNICATOR_BYTES: Final = 4096
_CALLS: Final = 5
_ELEMENTS: Final = 100
_LIBRARY: Final = 0

_NEWER_KERNEL: Final = "boot Linux 6.6 or newer for quick attaching with fewer privileges"
_OLDEST_KERNEL: Final = "boot Linux 5.15 or newer, or a distribution's kernel that has it; 6.6 preferred"
_OF_NEW_ENOUGH: Final = "; of such a kernel report this line"


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to count calls."""

    check: str
    attach: AttachKind
    enqueue_time: EnqueueTime
    lost: str
    """What is lost without it."""
    remedy: str


MODES: Final = (
    Mode(
        "uprobe session",
        AttachKind.MULTI,
        EnqueueTime.SESSION,
        "host time inside calls is not sampled unless --probe.enqueue-time=pair is given",
        f"boot Linux 6.13 or newer to have it{_OF_NEW_ENOUGH}",
    ),
    Mode(
        "uprobe_multi",
        AttachKind.MULTI,
        EnqueueTime.OFF,
        "perf events must serve",
        f"{_NEWER_KERNEL}{_OF_NEW_ENOUGH}",
    ),
    Mode(
        "uprobe_multi pair",
        AttachKind.MULTI,
        EnqueueTime.PAIR,
        "no pair of probes on uprobe_multi",
        f"{_NEWER_KERNEL}{_OF_NEW_ENOUGH}",
    ),
    Mode(
        "perf event uprobes",
        AttachKind.PERF,
        EnqueueTime.OFF,
        "there is no replacement for uprobe_multi",
        "give CAP_SYS_ADMIN to have it",
    ),
)


class OwnFunction:
    """A function with the shape of ncclAllReduce in an anonymous file, mapped as code by this process only."""

    def __init__(self) -> None:
        """Make the file; it is mapped by `map`.

        Raises:
            OSError: anonymous files are refused.
            ValueError: this processor's code is not known.
        """
        if platform.machine() not in _RETURN_ZERO:
            raise ValueError(f"no function to try probes on for {platform.machine()}")
        self.machine, code = _RETURN_ZERO[platform.machine()]
        self._mapping: mmap.mmap | None = None
        self._communicator = ctypes.create_string_buffer(_COMMUNICATOR_BYTES)
        try:
            self.descriptor = os.memfd_create("railscope-doctor", os.MFD_CLOEXEC | _MFD_EXEC)
        except OSError:  # Kernels before 6.3 know no such flag.
            self.descriptor = os.memfd_create("railscope-doctor", os.MFD_CLOEXEC)
        os.pwrite(self.descriptor, bytes(_FUNCTION_AT) + code, 0)
        os.ftruncate(self.descriptor, mmap.PAGESIZE)

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"

    @property
    def points(self) -> ProbePoints:
        function = next(f for f in COLLECTIVE_FUNCTIONS if f.symbol == "ncclAllReduce")
        cookie = collective_cookie(function, self.machine, _LIBRARY, stack_bytes=0)
        return ProbePoints((ProbePoint(function.symbol, _FUNCTION_AT, cookie),), (), (), (), (), (), False)

    def map(self) -> None:
        """Map it as code.

        Raises:
            OSError: a security module forbids it.
        """
        protection = mmap.PROT_READ | mmap.PROT_EXEC
        self._mapping = mmap.mmap(self.descriptor, mmap.PAGESIZE, mmap.MAP_PRIVATE, protection)

    def call(self) -> None:
        """Call it as ncclAllReduce of float32, with a communicator of zeros: only calls of one are timed."""
        if self._mapping is None:
            self.map()
        assert self._mapping is not None
        view = np.frombuffer(self._mapping, np.uint8)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        shape = ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer)
        communicator = ctypes.addressof(self._communicator)
        shape(view.ctypes.data + _FUNCTION_AT)(None, None, _ELEMENTS, int(DataType.Float32), 0, communicator, None)

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one way to count `_CALLS` calls."""

    attach: AttachKind
    enqueue_time: EnqueueTime
    calls: int
    payload_bytes: int
    events: int
    times: int
    """Calls whose host time was measured; 0 where it is off."""

    @property
    def exact(self) -> bool:
        expected_bytes = _CALLS * _ELEMENTS * DATA_TYPE_BYTES[DataType.Float32]
        expected_times = 0 if self.enqueue_time is EnqueueTime.OFF else _CALLS
        seen = (self.calls, self.payload_bytes, self.events, self.times)
        return seen == (_CALLS, expected_bytes, _CALLS, expected_times)

    def __str__(self) -> str:
        timed = "" if self.enqueue_time is EnqueueTime.OFF else f", timed {self.times}"
        return f"counted {self.calls} of {_CALLS} calls of our own, {self.events} events came through{timed}"


def try_mode(settings: ProgramSettings) -> Trial:
    """Try one way to probe: load, attach to a function of our own, call it, read what was counted, take it all away.

    Raises:
        LoadError, OSError, ValueError: the step that the kernel refuses.
    """
    with OwnFunction() as function:
        function.map()
        programs = NcclPrograms.load(settings)
        try:
            links = programs.attach(function.path, function.points, _LIBRARY, None)
            try:
                for _ in range(_CALLS):
                    function.call()
            finally:
                links.close()
            _, values = programs.aggregates.read()
            return Trial(
                programs.attach_kind,
                programs.enqueue_time,
                int(values["calls"].sum()),
                int(values["payload_bytes"].sum()),
                len(programs.call_events.read()),
                int(programs.enqueue_times()["calls"].sum()),
            )
        finally:
            programs.close()


def trial_settings(attach: AttachKind | None, enqueue_time: EnqueueTime | None) -> ProgramSettings:
    """Settings for a trial of the probes: small maps, every call timed."""
    return ProgramSettings(
        attach=attach,
        enqueue_time=enqueue_time,
        sample_every=1,
        ring_bytes=64 << 10,
        aggregate_entries=1024,
        communicator_entries=64,
    )


def configured_settings(config: Config) -> ProgramSettings:
    """What the agent would be told to load, with small maps."""
    return replace(trial_settings(attach_kind(config), enqueue_time(config)), loader=loader(config))


def check_probes(config: Config, objects: Path) -> list[Finding]:
    """Whether probes work here, from the system call to counted calls; `objects`: the folder of compiled programs."""
    findings = [
        *run_guarded("bpf(2)", lambda: [_map_type("bpf(2)", _BPF_MAP_TYPE_ARRAY, 4, "created and removed a map")]),
        *run_guarded(
            "ring buffer",
            lambda: [_map_type("ring buffer", _BPF_MAP_TYPE_RINGBUF, 0, "made and removed one")],
        ),
        *run_guarded("attach cookies", lambda: [_attach_cookies()]),
    ]
    first_loader = [*run_guarded("libbpf", _libbpf), *run_guarded("BPF objects", lambda: _objects(objects))]
    without = next((finding.what for finding in first_loader if finding.status == "problem"), None)
    findings += first_loader
    findings += run_guarded("bcc", lambda: [_bcc(config, without)])
    findings += run_guarded("uprobe events", lambda: _perf_type(config.sysfs))
    chosen = run_guarded("probes", lambda: [_chosen(config)])
    works = all(finding.status == "ok" for finding in chosen)
    for mode in MODES:
        findings += run_guarded(mode.check, lambda mode=mode: [_mode(mode, works)])  # type: ignore[misc]
    findings += [*chosen, *run_guarded("mapping events", lambda: _mapping_events(config.sysfs))]
    return findings + run_guarded("stop signals", _stop_signals)


def _map_type(check: str, kind: int, key_and_value_bytes: int, what: str) -> Finding:
    entries = mmap.PAGESIZE if kind == _BPF_MAP_TYPE_RINGBUF else 1
    attributes = struct.pack("<IIIII", kind, key_and_value_bytes, key_and_value_bytes, entries, 0).ljust(72, b"\0")
    try:
        os.close(bpf(_BPF_MAP_CREATE, attributes, "make a BPF map"))
    except KernelRefusal as refusal:
        return Finding(
            check, "problem", one_line(refusal), f"{privilege_remedy()}; in a container: allow bpf in seccomp"
        )
    return Finding(check, "ok", what)


def _attach_cookies() -> Finding:
    """Whether programs learn which function they were hit at: the newest of what all of the probes need."""
    check = "attach cookies"
    instructions = ctypes.create_string_buffer(_CALL_GET_ATTACH_COOKIE + _EXIT)
    licence = ctypes.create_string_buffer(b"Dual BSD/GPL")
    attributes = struct.pack(
        "<IIQQ", _BPF_PROG_TYPE_KPROBE, 2, ctypes.addressof(instructions), ctypes.addressof(licence)
    ).ljust(72, b"\0")
    try:
        os.close(bpf(_BPF_PROG_LOAD, attributes, "load a program that asks for one"))
    except KernelRefusal as refusal:
        known = refusal.errno != errno.EINVAL
        return Finding(check, "problem", one_line(refusal), privilege_remedy() if known else _OLDEST_KERNEL)
    return Finding(check, "ok", "loaded a program that asks for one")


def _libbpf() -> list[Finding]:
    try:
        library = ctypes.CDLL("libbpf.so.1")
    except OSError:
        remedy = "apt install libbpf1 (Debian, Ubuntu), or dnf install libbpf"
        return [Finding("libbpf", "problem", "libbpf.so.1 is missing", remedy)]
    version = library.libbpf_version_string
    version.restype = ctypes.c_char_p
    return [Finding("libbpf", "ok", f"{version().decode(errors='replace').removeprefix('v')}")]


def _bcc(config: Config, without: str | None) -> Finding:
    """`without`: why libbpf cannot load the programs on this host; None: it may."""
    version = bcc_loader.installed_version()
    remedy = "apt install python3-bpfcc (Debian, Ubuntu), or dnf install python3-bcc"
    chosen = loader(config)
    if version:
        use = f"loads the probes here: {without}" if without and chosen is None else "the second loader"
        return Finding("bcc", "ok", f"{version}, {use}")
    if chosen is Loader.BCC:
        return Finding("bcc", "problem", f"not installed for {bcc_loader.SYSTEM_PYTHON}", remedy)
    if without and chosen is None:
        return Finding("bcc", "problem", f"not installed, though libbpf cannot load the probes here: {without}", remedy)
    return Finding("bcc", "note", "not installed; it is only needed where libbpf cannot load the probes", remedy)


def _objects(folder: Path) -> list[Finding]:
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    names = [f"{stem}.{architecture}.bpf.o" for stem in OBJECT_STEMS]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        what = f"{', '.join(missing)} missing in {folder}"
        return [Finding("BPF objects", "problem", what, remedy_for_missing_file())]
    return [Finding("BPF objects", "ok", f"all {len(names)} for {platform.machine()}")]


def _perf_type(sysfs: Path) -> list[Finding]:
    try:
        return [Finding("uprobe events", "ok", f"perf event type {perf_uprobe_type(sysfs)}")]
    except KernelRefusal as refusal:
        return [Finding("uprobe events", "note", f"{one_line(refusal)}; only kernels before 6.6 need them")]


def _mode(mode: Mode, another_works: bool) -> Finding:
    try:
        trial = try_mode(trial_settings(mode.attach, mode.enqueue_time))
    except (LoadError, OSError, ValueError) as error:
        what = f"does not work: {one_line(error)}"
        if another_works:
            remedy = error.remedy if isinstance(error, IncompleteInstallation) else mode.remedy
            return Finding(mode.check, "note", f"{what}; without it: {mode.lost}", remedy)
        # The problem and its remedy are reported once, by the finding about what the agent would choose.
        return Finding(mode.check, "note", what)
    if trial.exact:
        return Finding(mode.check, "ok", str(trial))
    return Finding(
        mode.check, "problem", f"works, but is not exact: {trial}", "report this line and your kernel version"
    )


def _chosen(config: Config) -> Finding:
    try:
        trial = try_mode(configured_settings(config))
    except (LoadError, OSError, ValueError) as error:
        forced = [
            flag
            for flag, value in (
                ("--loader", config.loader),
                ("--probe.attach", config.probe_attach),
                ("--probe.enqueue-time", config.probe_enqueue_time),
            )
            if value != AUTO
        ]
        if isinstance(error, IncompleteInstallation):
            remedy = error.remedy
        else:
            remedy = f"leave out {' and '.join(forced)}, or fix the findings above" if forced else privilege_remedy()
        return Finding("probes", "problem", f"no call can be counted: {one_line(error)}", remedy)
    kind = {AttachKind.MULTI: "uprobe_multi links", AttachKind.PERF: "perf event links"}[trial.attach]
    times = {
        EnqueueTime.SESSION: "host time sampled by session probes",
        EnqueueTime.PAIR: "host time sampled by pairs of probes",
        EnqueueTime.OFF: "host time in calls not sampled",
    }[trial.enqueue_time]
    if not trial.exact:
        return Finding(
            "probes", "problem", f"{kind} are not exact: {trial}", "report this line and your kernel version"
        )
    return Finding("probes", "ok", f"the agent uses {kind}, {times}: {trial}")


def _mapping_events(sysfs: Path) -> list[Finding]:
    with OwnFunction() as function:
        inode = os.fstat(function.descriptor).st_ino
        try:
            with MmapEvents.open(sysfs=sysfs) as stream:
                function.map()
                told = any(event.inode == inode and event.pid == os.getpid() for event in stream.read())
        except MmapEventsError as error:
            return [Finding("mapping events", "problem", one_line(error), privilege_remedy())]
    if told:
        return [
            Finding("mapping events", "ok", "a test mapping was reported at once: libraries are found as they load")
        ]
    what = "the mmap event stream opens, but a test mapping was not reported: new libraries are found by scans"
    return [Finding("mapping events", "note", what, "run the agent in the host's pid namespace")]


def _stop_signals() -> list[Finding]:
    late = "a stopped rank is found by looking, and told of after --stall.floor"
    try:
        stops = Stops.load()
    except LoadError as error:
        remedy = error.remedy if isinstance(error, IncompleteInstallation) else privilege_remedy()
        return [Finding("stop signals", "note", f"{one_line(error)}: {late}", remedy)]
    try:
        told = _tells_of_a_stop(stops)
    finally:
        stops.close()
    if told:
        return [Finding("stop signals", "ok", "a test process that stopped was reported at once: so are stopped ranks")]
    what = f"the program attaches, but a test process that stopped was not reported: {late}"
    return [Finding("stop signals", "note", what, "report this line and your kernel version")]


def _tells_of_a_stop(stops: Stops) -> bool:
    """Whether a process that stops is told of: one of our own that waits until it is watched."""
    waits, goes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(waits, 1)
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:  # whatever interrupts it, it never goes on as a second doctor
            os._exit(0)
    try:
        stops.watch(pid)
        os.write(goes, b".")
        os.waitpid(pid, os.WUNTRACED)
        return pid in stops.read()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(waits)
        os.close(goes)
