"""Reads files of sysfs trees that are not trusted: bounded, without blocking.

A tree given by the user, or a driver that misbehaves, can hold a pipe, a folder, a loop of links or a file without an
end where a number is expected.  Opening without O_NONBLOCK would wait for a pipe's writer for ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from railscope.probes.netdev.counters import is_counter
from railscope.probes.netdev.ethtool import PCI_ADDRESS

_ATTRIBUTE_BYTES: Final = 4096
"""Sysfs shows at most a page."""
_COUNTER_BYTES: Final = 64
FOLDER_ENTRIES_LIMIT: Final = 4096


class NotANumber(ValueError):
    """A counter's file holds something other than a number."""


class NotCounted(NotANumber):
    """The port does not have this counter: the kernel's file reads `N/A (no PMA)`."""


def open_attribute(file: Path | str) -> int:
    """A descriptor to read a file of sysfs from; the caller closes it.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_counter(descriptor: int) -> int:
    """The counter that an open file shows now, as an unsigned number.

    Raises:
        OSError: the kernel refuses: ENODEV after the device went, EINVAL where it is not supported.
        NotANumber: it shows something else.
    """
    text = os.pread(descriptor, _COUNTER_BYTES, 0).strip()
    if not is_counter(text):
        if text.startswith(b"N/A"):
            raise NotCounted(text.decode("ascii", "replace"))
        raise NotANumber(f"expected a counter, found {text[:40]!r}")
    return int(text)


def read_text(file: Path | str) -> str:
    """What a file of sysfs shows, without surrounding space; empty where it cannot be read."""
    return read_bytes(file).decode("utf-8", "replace").strip()


def read_bytes(file: Path | str, most: int = _ATTRIBUTE_BYTES) -> bytes:
    """The beginning of what a file of sysfs holds, at most so many bytes; none where it cannot be read."""
    try:
        descriptor = open_attribute(file)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, most, 0)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def list_folder(folder: Path | str) -> list[str]:
    """Sorted names in a folder of sysfs, up to a limit; empty if it cannot be listed."""
    names: list[str] = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                names.append(entry.name)
                if len(names) == FOLDER_ENTRIES_LIMIT:
                    break
    except OSError:
        return []
    return sorted(names)


def read_link_name(link: Path | str) -> str:
    """Last part of what a link in sysfs points to; empty where there is none."""
    try:
        return os.readlink(link).rpartition("/")[2]  # noqa: PTH115 -- a Path takes as long as the call
    except OSError:
        return ""


def read_pci_address(device: Path | str) -> str:
    """The PCI function that a device hangs on, also through a bus of its own; empty for none."""
    direct = read_link_name(device)
    if PCI_ADDRESS.fullmatch(direct):
        return direct
    for part in reversed(os.path.realpath(device).split("/")):
        if PCI_ADDRESS.fullmatch(part):
            return part
    return ""


def read_numa_node(device: Path | str) -> int | None:
    """NUMA node of a device; None if the kernel has -1 or nothing."""
    text = read_text(f"{device}/numa_node")
    return int(text) if is_counter(text.encode()) else None
