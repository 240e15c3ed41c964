"""Which processes there are, which files they have mapped as code, and what /proc says about each of them.

Processes come and go while they are read: one that has gone reads as absent, never as an exception.  A process is
named by its pid and start time together, because pids are used again.  Names of files decide nothing: a mapped file is
its device and inode, and is opened through whichever way still leads to that inode.  Sources: proc(5), and fs/proc of
Linux 6.18 (`show_map_vma` escapes newlines only; `map_files` links need CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROCFS: Final = Path("/proc")
MAX_MAPS_BYTES: Final = 32 << 20
MAX_ENVIRON_BYTES: Final = 1 << 20
FULL_SCAN_EVERY: Final = 8
"""A process whose address space has not changed in size is read again at every eighth scan only."""

_PF_KTHREAD: Final = 0x00200000
_OVERLAYFS_MAGIC: Final = 0x794C7630
_EXECUTABLE_FILE: Final = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..x. [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) ([1-9][0-9]*) +(/.*)$", re.MULTILINE
)
_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})
_LEADS_NOWHERE: Final = _GONE | {errno.ELOOP, errno.ENAMETOOLONG}
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE})
_CAPABILITIES: Final = ("CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE", "CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE")
"""What opening each of `mapping_paths` may take."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same pid."""

    pid: int
    start_time_ticks: int
    """Clock ticks (sysconf SC_CLK_TCK a second) from boot to its start: field 22 of /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class FileKey:
    """A file as /proc/PID/maps names it.  On overlayfs and btrfs `device` may differ from what stat says."""

    device: tuple[int, int]
    inode: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """The first executable mapping of a file in a process."""

    start: int
    end: int
    device: tuple[int, int]
    """Major and minor number."""
    inode: int
    path: str
    """As the process's mount namespace names it."""
    deleted: bool

    @property
    def file(self) -> FileKey:
        return FileKey(self.device, self.inode)


class MappedFileError(Exception):
    """A mapped file cannot be opened; the message is one line that says why and what would help."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone: Final = gone
        """The process ended or unmapped the file: nothing is wrong."""


@dataclass(frozen=True, slots=True)
class _Stat:
    """What is needed from /proc/PID/stat."""

    state: str
    kernel_thread: bool
    cpu_ticks: int
    """That it has taken."""
    threads: int
    start_time_ticks: int
    address_space_bytes: int
    stack_start: int


def process_ids(procfs: Path = PROCFS) -> list[int]:
    """Pids of all processes that this /proc shows, in order."""
    return _numbered(procfs)


def identity_of(procfs: Path, pid: int) -> ProcessIdentity | None:
    """The process (pid and start time) that has this pid now, `None` when there is none."""
    facts = _stat(procfs, pid)
    return None if facts is None else ProcessIdentity(pid, facts.start_time_ticks)


def is_alive(procfs: Path, identity: ProcessIdentity) -> bool:
    """Whether that very process still runs.  A zombie does not, unless other threads outlived the first one."""
    facts = _stat(procfs, identity.pid)
    if facts is None or facts.start_time_ticks != identity.start_time_ticks:
        return False
    return facts.state not in "ZX" or facts.threads > 1


def program_mark(procfs: Path, identity: ProcessIdentity) -> int | None:
    """Tells the program that a process runs from the one it ran before execve(2), which keeps pid and start time.

    It is the address at which the program's stack begins (field 28 of /proc/PID/stat), which the kernel draws for each
    program; where that is switched off (personality(2)), two programs may have the same.  None: the process is another
    one, is ending, or may not be traced.
    """
    facts = _stat(procfs, identity.pid)
    if facts is None or facts.start_time_ticks != identity.start_time_ticks:
        return None
    return facts.stack_start or None


def executable_mappings(procfs: Path, pid: int) -> list[Mapping]:
    """Every file that the process has mapped executable, once each; empty when it has gone or may not be read."""
    try:
        maps = _read(f"{procfs}/{pid}/maps", MAX_MAPS_BYTES)
    except PermissionError:
        return []
    return list(parse_maps(maps or b"").values())


def parse_maps(maps: bytes) -> dict[FileKey, Mapping]:
    """The executable file mappings in the text of a /proc/PID/maps, the first of each file.

    The kernel marks newlines (`\\012`) and deletion (` (deleted)`), but not a file whose own name looks like either:
    such a path does not lead to the inode, and `open_mapped_file` goes another way.
    """
    found: dict[FileKey, Mapping] = {}
    for match in _EXECUTABLE_FILE.finditer(maps):
        start, end, major, minor, inode, raw = match.groups()
        key = FileKey((int(major, 16), int(minor, 16)), int(inode))
        if key in found:
            continue
        path, deleted = raw.replace(rb"\012", b"\n"), raw.endswith(b" (deleted)")
        found[key] = Mapping(
            int(start, 16), int(end, 16), key.device, key.inode, os.fsdecode(path.removesuffix(b" (deleted)")), deleted
        )
    return found


def mapping_paths(procfs: Path, pid: int, mapping: Mapping) -> tuple[str, str, str]:
    """Paths that may lead to a mapped file: as we see it, as the process sees it, and the kernel's link to it.

    The kernel tells paths from our own root, or from that of the mount namespace where ours does not lead there: a
    process that has changed its root (chroot) within a namespace of its own knows less of the path.
    """
    try:
        root = str(Path(f"{procfs}/{pid}/root").readlink())
    except OSError:
        root = "/"  # what stands in the way shows when the path is opened
    within = mapping.path.removeprefix(root) if mapping.path.startswith(f"{root}/") else mapping.path
    return (
        mapping.path,
        f"{procfs}/{pid}/root{within}",
        f"{procfs}/{pid}/map_files/{mapping.start:x}-{mapping.end:x}",
    )


def open_mapped_file(procfs: Path, pid: int, mapping: Mapping) -> int:
    """Open the file behind a mapping for reading; the caller closes the descriptor.

    Tried in order: the path as we see it, the path as the process sees it, and the kernel's link to the mapping, which
    also leads to deleted files.  A way counts only when it ends at a regular file with the mapping's inode number; the
    device may differ where overlayfs or btrfs report another one for the same file.  A uprobe attaches to it as
    `/proc/self/fd/N`.

    Raises:
        MappedFileError: no way leads there; says which permission is missing, what else stood in the way, or that
            process or file have gone.
    """
    refusals: list[str] = []
    trouble: OSError | None = None
    for number, path in enumerate(mapping_paths(procfs, pid, mapping)):
        try:
            # O_PATH touches nothing: a path that now leads to a device or a pipe must not be opened.
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _REFUSED:
                refusals.append(_CAPABILITIES[number])
            elif error.errno not in _LEADS_NOWHERE:
                trouble = error
            continue
        except ValueError:  # A NUL in the path: not from a kernel.
            continue
        try:
            status = os.fstat(place)
            same_device = (os.major(status.st_dev), os.minor(status.st_dev)) == mapping.device
            same = status.st_ino == mapping.inode and (same_device or number > 0)
            if stat.S_ISREG(status.st_mode) and (same or (number == 2 and on_overlayfs(place))):
                # Who holds a write lease on it would make an open wait for up to /proc/sys/fs/lease-break-time.
                return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _REFUSED:
                refusals.append("CAP_DAC_READ_SEARCH")
            else:
                trouble = error
        finally:
            os.close(place)
    name = mapping.path.replace("\n", "\\n")
    if trouble is not None and trouble.errno in _NO_ROOM:
        advice = "raise the limit of open files (LimitNOFILE= of the service, ulimit -n)"
        raise MappedFileError(f"{name}, mapped by process {pid}, cannot be opened: {trouble.strerror}: {advice}")
    if identity_of(procfs, pid) is None:
        raise MappedFileError(f"{name}: process {pid}, which mapped it, has ended", gone=True)
    if trouble is not None:
        why = "a process holds a write lease on it" if trouble.errno == errno.EWOULDBLOCK else trouble.strerror
        raise MappedFileError(f"{name}, mapped by process {pid}, cannot be opened: {why}")
    if refusals:
        missing = " and ".join(dict.fromkeys(refusals))
        raise MappedFileError(
            f"{name}, mapped by process {pid}, cannot be opened (no permission): grant railscope {missing}"
        )
    raise MappedFileError(f"{name} is no longer mapped by process {pid}", gone=True)


@dataclass(frozen=True, slots=True)
class Survey:
    """The processes of a host at one time."""

    living: frozenset[ProcessIdentity]
    """All with an address space of their own: no kernel thread, no zombie."""
    due: tuple[ProcessIdentity, ...]
    """Those whose mappings may have changed, the ones first that have taken most CPU time: a job's ranks before the
    hundreds of processes that map the same libraries and do nothing with them."""


@dataclass(slots=True)
class _Remembered:
    address_space_bytes: int
    scans: int


class AddressSpaces:
    """Tells which processes may have mapped something since they were looked at last.

    Reading maps is what costs, so a process whose address space has kept its size is taken as unchanged for a few
    scans.  A library that replaced another one without changing that size is seen with delay, unless a stream of
    mapping events (probes/libraries/mmap_events.py) told of it.  Nothing here reads a process's memory or mappings: the
    kernel answers from what it keeps itself, whatever the process does.
    """

    def __init__(self, procfs: Path = PROCFS) -> None:
        self._procfs = procfs
        self._remembered: dict[ProcessIdentity, _Remembered] = {}

    def survey(self) -> Survey:
        """Ask the kernel about all processes."""
        remembered: dict[ProcessIdentity, _Remembered] = {}
        due: list[tuple[int, ProcessIdentity]] = []
        for pid in process_ids(self._procfs):
            facts = _stat(self._procfs, pid)
            if facts is None or facts.kernel_thread or facts.address_space_bytes == 0:
                continue
            identity = ProcessIdentity(pid, facts.start_time_ticks)
            before = self._remembered.get(identity)
            if (
                before is not None
                and before.address_space_bytes == facts.address_space_bytes
                and before.scans < FULL_SCAN_EVERY
            ):
                before.scans += 1
                remembered[identity] = before
                continue
            due.append((facts.cpu_ticks, identity))
            remembered[identity] = _Remembered(facts.address_space_bytes, 1)
        self._remembered = remembered
        due.sort(key=lambda one: -one[0])
        return Survey(frozenset(remembered), tuple(identity for _, identity in due))

    def again(self, identity: ProcessIdentity) -> None:
        """This one could not be looked at: it is due at the next survey."""
        self._remembered.pop(identity, None)


def unreadable_processes(procfs: Path = PROCFS) -> int:
    """Processes whose mappings may not be read: CAP_SYS_PTRACE is missing.  Nothing is read of those that may be."""
    unreadable = 0
    for pid in process_ids(procfs):
        facts = _stat(procfs, pid)
        if facts is None or facts.kernel_thread or facts.address_space_bytes == 0:
            continue
        try:
            os.close(os.open(f"{procfs}/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC))
        except PermissionError:
            unreadable += 1
        except OSError as error:
            if error.errno not in _GONE:
                raise
    return unreadable


def environ(procfs: Path, pid: int) -> dict[str, str]:
    """The environment that a process started with, at most its first MiB; empty when gone or not permitted."""
    text = _read_if_allowed(f"{procfs}/{pid}/environ", MAX_ENVIRON_BYTES)
    entries = (entry.partition(b"=") for entry in text.split(b"\0") if b"=" in entry)
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, _, value in entries}


def command_line(procfs: Path, pid: int, budget_bytes: int) -> bytes:
    """The text of /proc/PID/cmdline, cut at the budget: words that end in NUL.  A process may change it as it likes.

    Empty where the process has gone, has none (a zombie), or may not be read.
    """
    return _read_if_allowed(f"{procfs}/{pid}/cmdline", budget_bytes)


def command_name(procfs: Path, pid: int) -> bytes:
    """The text of /proc/PID/comm, 15 bytes that a process may change; empty when gone or not permitted."""
    return _read_if_allowed(f"{procfs}/{pid}/comm", 64).rstrip(b"\n")


def cgroup(procfs: Path, pid: int) -> str | None:
    """The path of a process's control group, of version 2 if it has one, else the longest of version 1."""
    try:
        text = _read(f"{procfs}/{pid}/cgroup", 64 << 10)
    except PermissionError:
        return None
    lines = [
        line.split(":", 2) for line in (text or b"").decode("utf-8", "replace").splitlines() if line.count(":") >= 2
    ]
    unified = next((path for number, _, path in lines if number == "0"), None)
    if unified is not None and unified != "/":
        return unified
    return max((path for _, _, path in lines), key=len, default=None)


_DELEGATED: Final = re.compile(r"/user@\d+\.service(?=[/\n]|$)[^\n]*")


def system_part(cgroup: str) -> str:
    """A control group's path, or the text of a /proc/PID/cgroup, without what lies below a user's own manager.

    There the user makes groups and names them as he likes (systemd's user@.service, `Delegate=`).
    """
    return _DELEGATED.sub("", cgroup)


def pid_namespace(procfs: Path, pid: int) -> int | None:
    """Inode number of a process's pid namespace, `None` when it has gone or may not be asked."""
    try:
        return (procfs / str(pid) / "ns/pid").stat().st_ino
    except OSError:
        return None


def open_pidfd(procfs: Path, identity: ProcessIdentity) -> int | None:
    """A descriptor that becomes readable when a process ends, `None` when it has ended; the caller closes it.

    Raises:
        OSError: the kernel refuses for another reason (too many open files).
    """
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    try:
        # The pid may have passed to another process before the descriptor held it; from here on it cannot.
        alive = is_alive(procfs, identity)
    except OSError:
        os.close(fd)
        raise
    if alive:
        return fd
    os.close(fd)
    return None


def _numbered(folder: Path | str) -> list[int]:
    with os.scandir(folder) as entries:
        return sorted(int(entry.name) for entry in entries if entry.name.isdecimal())


def _stat(procfs: Path, pid: int, file: str = "stat") -> _Stat | None:
    try:
        text = _read(f"{procfs}/{pid}/{file}", 4096)
    except PermissionError:
        return None
    # The name in brackets may itself hold brackets and spaces: the last one ends it.
    fields = (text or b"").rpartition(b")")[2].split()
    if len(fields) < 26:
        return None
    try:
        return _Stat(
            state=fields[0].decode("ascii", "replace"),
            kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            threads=int(fields[17]),
            start_time_ticks=int(fields[19]),
            address_space_bytes=int(fields[20]),
            stack_start=int(fields[25]),
        )
    except ValueError:
        return None


def _read_if_allowed(path: str, budget_bytes: int) -> bytes:
    """`_read`, and nothing where there is nothing or the kernel does not let us look."""
    try:
        return _read(path, budget_bytes) or b""
    except PermissionError:
        return b""


def _read(path: str, budget_bytes: int) -> bytes | None:
    """Up to so many bytes of a /proc file, cut at the budget; `None` when its process has gone.

    Raises:
        PermissionError: the kernel does not let us look.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    parts: list[bytes] = []
    try:
        while budget_bytes > 0 and (part := os.read(fd, min(budget_bytes, 1 << 16))):
            parts.append(part)
            budget_bytes -= len(part)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    finally:
        os.close(fd)
    return b"".join(parts)


_libc = ctypes.CDLL(None, use_errno=True)


def filesystem_magic(fd: int) -> int:
    """The magic number of the file system that holds a file (statfs(2)); 0: it does not tell."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(ctypes.c_int(fd), buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[:8], "little")


def on_overlayfs(fd: int) -> bool:
    """Whether a file is seen through overlayfs."""
    return filesystem_magic(fd) == _OVERLAYFS_MAGIC
