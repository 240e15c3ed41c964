"""Loading a BPF object file with libbpf, through ctypes.

libbpf.so.1 is the kernel's own loader library and part of every current distribution; of the ways to reach it from
Python this one costs 10 MB instead of the BPF Compiler Collection's 130 (see the bench).  libbpf is used for what it is
good at, parsing the object, relocating and loading it; maps are read by probes/loading/maps.py, and programs attached
by probes/loading/links.py.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from railscope.probes.installation import remedy_for_missing_file

_log = logging.getLogger(__name__)

OBJECTS: Final = Path(__file__).resolve().parents[1] / "bpf"
"""Where the compiled BPF objects lie."""
ARCHITECTURES: Final = {"x86_64": "x86", "aarch64": "arm64"}
"""The part of an object's name that says which processor it is for, by machine."""

OBJECT_STEMS: Final = ("nccl", "nccl_session", "nccl_internals", "driver_calls", "transfers", "stops", "empty")
"""What the names of the objects begin with."""

_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class LoadError(RuntimeError):
    """A BPF object could not be loaded; one line says why and what to do."""


class IncompleteInstallation(LoadError):
    """A file of railscope's own is missing or of another version; no kernel and no right is at fault."""

    def __init__(self, what: str) -> None:
        self.remedy: Final = remedy_for_missing_file()
        super().__init__(f"{what}: {self.remedy}")


class HostRefusal(LoadError):
    """This host lets this user load nothing, whatever loads it."""


def object_path(stem: str) -> Path:
    """The compiled BPF object for this machine's processor; `stem` is one of `OBJECT_STEMS`.

    Raises:
        LoadError: it is missing, or there is none for such a processor.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise LoadError(f"there are BPF objects for {' and '.join(ARCHITECTURES)}, and none for {machine}")
    path = OBJECTS / f"{stem}.{ARCHITECTURES[machine]}.bpf.o"
    if not path.is_file():
        raise IncompleteInstallation(f"{path} is missing")
    return path


class _Library:
    """The functions of libbpf that are used, with their types."""

    def __init__(self) -> None:
        try:
            self.handle = ctypes.CDLL("libbpf.so.1", use_errno=True)
        except OSError:
            raise LoadError("libbpf.so.1 is missing: install the package libbpf1 (Debian) or libbpf (others)") from None
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        self.open_file = self._function("bpf_object__open_file", pointer, text, pointer)
        self.load = self._function("bpf_object__load", number, pointer)
        self.close = self._function("bpf_object__close", None, pointer)
        self.find_program = self._function("bpf_object__find_program_by_name", pointer, pointer, text)
        self.next_program = self._function("bpf_object__next_program", pointer, pointer, pointer)
        self.program_name = self._function("bpf_program__name", text, pointer)
        self.program_fd = self._function("bpf_program__fd", number, pointer)
        self.set_autoload = self._function("bpf_program__set_autoload", number, pointer, ctypes.c_bool)
        self.set_attach_type = self._function("bpf_program__set_expected_attach_type", number, pointer, ctypes.c_int)
        self.find_map = self._function("bpf_object__find_map_by_name", pointer, pointer, text)
        self.next_map = self._function("bpf_object__next_map", pointer, pointer, pointer)
        self.map_name = self._function("bpf_map__name", text, pointer)
        self.map_fd = self._function("bpf_map__fd", number, pointer)
        self.reuse_map = self._function("bpf_map__reuse_fd", number, pointer, number)
        self.set_max_entries = self._function("bpf_map__set_max_entries", number, pointer, ctypes.c_uint32)
        self.set_print = self._function("libbpf_set_print", pointer, _PRINT)

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.handle, name)
        function.restype = result  # type: ignore[attr-defined]
        function.argtypes = list(arguments)  # type: ignore[attr-defined]
        return function


_LIBBPF_WARN: Final = 0


class LoadedObject:
    """A loaded object: descriptors of its programs and maps, valid until `close`."""

    def __init__(self, program_fds: Mapping[str, int], map_fds: Mapping[str, int], close: Callable[[], None]) -> None:
        self.program_fds = program_fds
        self.map_fds = map_fds
        self._close = close

    def close(self) -> None:
        """Free programs and maps; links that still use a program keep it alive."""
        self._close()


def load(
    path: Path,
    *,
    attach_types: Mapping[str, int],
    map_entries: Mapping[str, int],
    constants: bytes | None = None,
    constants_map: str = ".rodata",
    shared_maps: Mapping[str, int] | None = None,
) -> LoadedObject:
    """Have libbpf load the programs of `attach_types` (name → expected attach type) and leave the object's others out.

    `map_entries` overrides max_entries by map name.  `constants` replaces the leading bytes of `constants_map`.
    Maps of this object that `shared_maps` names (name → descriptor) are not made anew: the programs use those.

    Raises:
        LoadError: with the kernel's reason and, where it is known, the remedy.
    """
    library = _Library()
    messages: list[str] = []

    def collect(level: int, template: bytes, arguments: int) -> int:
        if level == _LIBBPF_WARN:
            buffer = ctypes.create_string_buffer(1 << 16)
            ctypes.CDLL(None).vsnprintf(buffer, ctypes.c_size_t(len(buffer)), template, ctypes.c_void_p(arguments))
            messages.append(buffer.value.decode(errors="replace").strip())
        return 0

    callback = _PRINT(collect)
    silent = library.set_print(callback)
    try:
        handle = library.open_file(os.fsencode(path), None)
        if not handle:
            raise LoadError(f"{path}: cannot be read as a BPF object: {_last(messages, ctypes.get_errno())}")
        try:
            _prepare(library, handle, attach_types, map_entries, constants, constants_map)
            _share(library, handle, shared_maps or {})
            result = library.load(handle)
            if result < 0:
                raise _refusal(path, -result, messages)
            # Descriptors of our own: what libbpf keeps of an object is as large as the rest of the agent's heap.
            programs = {
                name: _own(library.program_fd(library.find_program(handle, name.encode()))) for name in attach_types
            }
            maps = {name: _own(descriptor) for name, descriptor in _maps(library, handle).items()}
        finally:
            library.close(handle)
        return LoadedObject(programs, maps, lambda: _close([*programs.values(), *maps.values()]))
    finally:
        library.set_print(ctypes.cast(silent, _PRINT) if silent else _PRINT())


def _own(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _prepare(
    library: _Library,
    handle: int,
    attach_types: Mapping[str, int],
    map_entries: Mapping[str, int],
    constants: bytes | None,
    constants_map: str,
) -> None:
    program = library.next_program(handle, None)
    seen = set()
    while program:
        name = library.program_name(program).decode()
        seen.add(name)
        wanted = name in attach_types
        library.set_autoload(program, wanted)
        if wanted:
            library.set_attach_type(program, attach_types[name])
        program = library.next_program(handle, program)
    if missing := set(attach_types) - seen:
        raise IncompleteInstallation(f"the BPF object has no program {', '.join(sorted(missing))}")
    for name, entries in map_entries.items():
        found = library.find_map(handle, name.encode())
        if not found or library.set_max_entries(found, entries) < 0:
            raise IncompleteInstallation(f"the BPF object has no map {name} to resize")
    if constants is not None:
        _set_constants(library, handle, constants, constants_map)


def _share(library: _Library, handle: int, shared_maps: Mapping[str, int]) -> None:
    for name, descriptor in shared_maps.items():
        found = library.find_map(handle, name.encode())
        if found and library.reuse_map(found, descriptor) < 0:
            raise IncompleteInstallation(f"the map {name} cannot be shared between two BPF objects")


def _set_constants(library: _Library, handle: int, constants: bytes, constants_map: str) -> None:
    found = library.find_map(handle, constants_map.encode())
    initial = library.handle.bpf_map__initial_value
    initial.restype = ctypes.c_void_p
    initial.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    size = ctypes.c_size_t()
    address = initial(found, ctypes.byref(size)) if found else None
    if not address or size.value < len(constants):
        raise IncompleteInstallation(f"the BPF object's constants are not {len(constants)} bytes")
    ctypes.memmove(address, constants, len(constants))


def _maps(library: _Library, handle: int) -> dict[str, int]:
    maps = {}
    entry = library.next_map(handle, None)
    while entry:
        maps[library.map_name(entry).decode()] = library.map_fd(entry)
        entry = library.next_map(handle, entry)
    return maps


def _last(messages: list[str], number: int) -> str:
    return messages[-1] if messages else os.strerror(number)


def host_refusal(number: int) -> HostRefusal | None:
    """What a failed load's errno tells about this host, independent of the program; None: the program is the cause."""
    if number in (errno.EPERM, errno.EACCES) and os.geteuid() != 0:
        text = "the kernel does not let this user load BPF programs: run as root, or with CAP_BPF and CAP_PERFMON"
    elif number == errno.EPERM:
        text = "the kernel refuses BPF programs (EPERM): check CAP_BPF and CAP_PERFMON, lockdown mode and seccomp"
    elif number == errno.ENOSYS:
        text = "this kernel has no bpf(2) (CONFIG_BPF_SYSCALL): railscope needs Linux 5.15 or newer"
    else:
        return None
    return HostRefusal(text)


def _refusal(path: Path, number: int, messages: list[str]) -> LoadError:
    for message in messages:
        _log.debug("libbpf: %s", message)
    if host := host_refusal(number):
        return host
    interesting = [message for message in messages if "failed" in message or "unknown" in message]
    reason = _last(interesting or messages, number)
    return LoadError(f"{path.name}: the kernel refused it ({os.strerror(number)}): {reason}")
