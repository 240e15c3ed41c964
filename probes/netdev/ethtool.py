"""Driver, bus address and speed of a network device, by the ethtool ioctl.

Unlike sysfs, which shows the namespace that mounted it, the ioctl answers for the namespace of its socket; the
two commands used need no capability.  Source: the kernel's include/uapi/linux/ethtool.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import re
import socket
import struct
from typing import Final

_SIOCETHTOOL: Final = 0x8946
_GET_DRIVER: Final = 0x3
_GET_LINK_SETTINGS: Final = 0x4C
_REQUEST: Final = struct.Struct("=16sQ8x")
"""struct ifreq on 64-bit: name, pointer to the command."""
_DRIVER: Final = struct.Struct("=I32s32s32s32s")
"""struct ethtool_drvinfo: command, driver, version, firmware version, bus address."""
_DRIVER_BYTES: Final = 196
_LINK_SETTINGS: Final = struct.Struct("=II7xb")
"""struct ethtool_link_settings: command, speed in Mb/s, words in each of three bit masks."""
_LINK_SETTINGS_BYTES: Final = 48
_SPEED_UNKNOWN: Final = 0xFFFFFFFF
BYTES_PER_MEGABIT: Final = 125_000

PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Ethtool:
    """The ioctl's socket, in the network namespace of the thread that makes it; usable from any thread since."""

    def __init__(self) -> None:
        """Raises OSError when the kernel refuses a socket."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self._socket.close()

    def driver(self, name: str) -> tuple[str, str]:
        """(driver, PCI address) of a device; either is empty where there is none to tell."""
        command = bytearray(_DRIVER_BYTES)
        struct.pack_into("=I", command, 0, _GET_DRIVER)
        if not self._ask(name, command):
            return "", ""
        _command, driver, _version, _firmware, bus = _DRIVER.unpack_from(command)
        address = _text(bus)
        return _text(driver), address if PCI_ADDRESS.fullmatch(address) else ""

    def speed_bytes_per_second(self, name: str) -> int | None:
        """Speed of the link in bytes per second; None while it is not known, as without a carrier."""
        command = bytearray(_LINK_SETTINGS_BYTES)
        struct.pack_into("=I", command, 0, _GET_LINK_SETTINGS)
        if not self._ask(name, command):
            return None
        # The first answer only says, as a negative number, how long the masks are that the second one will carry.
        words = -_LINK_SETTINGS.unpack_from(command)[2]
        if words > 0:
            command = bytearray(_LINK_SETTINGS_BYTES + 3 * 4 * words)
            _LINK_SETTINGS.pack_into(command, 0, _GET_LINK_SETTINGS, 0, words)
            if not self._ask(name, command):
                return None
        megabits = _LINK_SETTINGS.unpack_from(command)[1]
        return None if megabits in (0, _SPEED_UNKNOWN) else megabits * BYTES_PER_MEGABIT

    def _ask(self, name: str, command: bytearray) -> bool:
        """Run one command in place; False where the device is gone or its driver does not offer it."""
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(command))
        try:
            fcntl.ioctl(self._socket, _SIOCETHTOOL, _REQUEST.pack(name.encode(), pointer))
        except OSError:
            return False
        return True


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("ascii", "replace")
