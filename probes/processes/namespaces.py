"""Which network namespace a process lives in, and how to work inside it.

A network namespace is identified by the inode of `/proc/PID/ns/net` (namespaces(7)).  A socket belongs for life to
the namespace of the thread that made it, whichever thread uses it later; so a short-lived thread moves with
setns(2), makes what is needed, and ends, and no other thread ever leaves its own namespace.

An open socket keeps its namespace alive, and with it a network card that was moved into it: its opener closes
it as soon as the last process it was opened for has gone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

_CLONE_NEWNET: Final = 0x40000000
FIRST_NAMESPACE: Final = 0xF0000000
"""Inodes of namespaces are not below it, but for some of the first ones (the kernel's fs/proc/generic.c)."""
_NS_GET_USERNS: Final = 0xB701
_NS_GET_PARENT: Final = 0xB702
_NS_GET_OWNER_UID: Final = 0xB704
_MOST_NESTED: Final = 33
"""User namespaces: the kernel allows 32 below the first one."""
_FIRST_USER_NAMESPACE: Final = 0xEFFFFFFD
"""Its inode (PROC_USER_INIT_INO in the kernel's include/linux/proc_ns.h)."""
_LINK: Final = re.compile(r"net:\[(\d+)\]")

Result = TypeVar("Result")


class NamespaceError(RuntimeError):
    """A network namespace cannot be named or entered."""


class NamespaceGone(NamespaceError):
    """The process that the namespace was reached through has ended."""


class NamespaceDenied(NamespaceError):
    """The agent lacks the rights; what can be read from outside still can."""


@dataclass(frozen=True, slots=True)
class NetworkNamespace:
    """One network namespace, and the file through which it can be entered."""

    inode: int
    path: Path
    """`PROCFS/PID/ns/net` of the process through which it was found."""
    own: bool
    """True for the namespace in which the agent itself runs."""

    @property
    def process_folder(self) -> Path:
        """`PROCFS/PID` of the process through which it was found."""
        return self.path.parent.parent


def network_namespace(procfs: Path, pid: int | Literal["self"]) -> NetworkNamespace:
    """The network namespace of a process, from `PROCFS/PID/ns/net`.

    Raises:
        NamespaceGone: there is no such process any more.
        NamespaceDenied: the process belongs to another user (CAP_SYS_PTRACE is needed).
    """
    path = procfs / str(pid) / "ns" / "net"
    inode = _inode(path)
    try:
        own = inode == _inode(procfs / "self" / "ns" / "net")
    except NamespaceError:
        own = False  # a procfs of another pid namespace, or a recorded one: there is no "self" in it
    return NetworkNamespace(inode, path, own)


def made_by_root(namespace: NetworkNamespace) -> bool:
    """Whether a network namespace belongs to the host's first user namespace: only root makes such, no tenant.

    False as well where it cannot be known.  Source: ioctl_ns(2), NS_GET_USERNS.
    """
    try:
        descriptor = os.open(namespace.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        owner = fcntl.ioctl(descriptor, _NS_GET_USERNS)
    except OSError:  # EPERM: it lies outside ours
        return False
    finally:
        os.close(descriptor)
    try:
        return os.fstat(owner).st_ino == _FIRST_USER_NAMESPACE
    finally:
        os.close(owner)


def maker_of_user_namespace(procfs: Path, pid: int) -> int | None:
    """Who made the outermost user namespace around a process that is not the host's first one, by uid.

    None: it runs in the first one, or it cannot be known.  Source: ioctl_ns(2), NS_GET_PARENT, NS_GET_OWNER_UID.
    """
    try:
        descriptor = os.open(procfs / str(pid) / "ns" / "user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_ino == _FIRST_USER_NAMESPACE:
            return None
        for _ in range(_MOST_NESTED):
            parent = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            if os.fstat(parent).st_ino == _FIRST_USER_NAMESPACE:
                os.close(parent)
                owner = bytearray(4)
                fcntl.ioctl(descriptor, _NS_GET_OWNER_UID, owner)
                return int.from_bytes(owner, sys.byteorder)
            os.close(descriptor)
            descriptor = parent
    except OSError:  # EPERM: it lies outside ours
        pass
    finally:
        os.close(descriptor)
    return None


def named_namespaces(folder: Path = Path("/run/netns")) -> Mapping[int, str]:
    """Names of network namespaces given by `ip netns add`, by inode; empty where the folder is missing."""
    names: dict[int, str] = {}
    try:
        for file in sorted(folder.iterdir()):
            names.setdefault(file.stat().st_ino, file.name)
    except OSError:
        return names
    return names


def name_namespace(namespace: NetworkNamespace | None, names: Mapping[int, str]) -> str:
    """How people call a network namespace, by `named_namespaces`; empty: the agent's own, or not known."""
    if namespace is None or namespace.own:
        return ""
    return names.get(namespace.inode, f"net:[{namespace.inode}]")


def run_inside(namespace: NetworkNamespace, function: Callable[[], Result]) -> Result:
    """Run a function in a thread that lives in the given network namespace; returns what it returns.

    Exceptions of the function are raised here.  The agent's own namespace is not entered: the function runs directly.

    Raises:
        NamespaceGone: the process has ended, or its number belongs to a process in another namespace now.
        NamespaceDenied: CAP_SYS_ADMIN is missing.
    """
    if namespace.own:
        return function()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"netns-{namespace.inode}") as visitor:
        return visitor.submit(_visit, namespace, function).result()


def _visit(namespace: NetworkNamespace, function: Callable[[], Result]) -> Result:
    _enter(namespace)
    return function()


def _enter(namespace: NetworkNamespace) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = os.open(namespace.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _explained(error, namespace.path) from None
    try:
        if os.fstat(descriptor).st_ino != namespace.inode:
            raise NamespaceGone(f"{namespace.path} is another namespace now: the process has ended")
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise _explained(OSError(number, os.strerror(number)), namespace.path)
    finally:
        os.close(descriptor)


def _inode(path: Path) -> int:
    try:
        target = str(path.readlink())
    except OSError as error:
        raise _explained(error, path) from None
    match = _LINK.fullmatch(target)
    if match is None:
        raise NamespaceError(f"{path}: expected net:[inode], found {target[:40]!r}")
    return int(match[1])


def _explained(error: OSError, path: Path) -> NamespaceError:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return NamespaceGone(f"{path}: the process has ended")
    if error.errno in (errno.EPERM, errno.EACCES):
        return NamespaceDenied(f"{path}: not allowed: run as root or grant CAP_SYS_ADMIN and CAP_SYS_PTRACE")
    return NamespaceError(f"{path}: {error.strerror}")
