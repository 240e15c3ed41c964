"""Take the kernel proper, an ELF file, out of the compressed one that distributions ship.

    python3 vmlinux.py BZIMAGE VMLINUX

Source: the kernel's Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header".  The payload is followed by four
bytes with its uncompressed size, which tells whether all of it was read.
"""

from __future__ import annotations

import lzma
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

_SETUP_SECTORS_AT: Final = 0x1F1
_MAGIC_AT: Final = 0x202
_PAYLOAD_AT: Final = 0x248
_SECTOR_BYTES: Final = 512
_XZ: Final = b"\xfd7zXZ\0"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"


def vmlinux(image: bytes) -> bytes:
    """The ELF file in a bzImage.

    Raises:
        ValueError: it is no bzImage, is compressed in another way, or is damaged.
    """
    if image[_MAGIC_AT : _MAGIC_AT + 4] != b"HdrS":
        raise ValueError("no bzImage")
    offset, size = struct.unpack_from("<II", image, _PAYLOAD_AT)
    start = ((image[_SETUP_SECTORS_AT] or 4) + 1) * _SECTOR_BYTES + offset
    payload, (expected,) = image[start : start + size - 4], struct.unpack_from("<I", image, start + size - 4)
    if payload.startswith(_XZ):
        kernel = lzma.decompress(payload)
    elif payload.startswith(_ZSTD):
        kernel = subprocess.run(["zstd", "-dc"], input=payload, stdout=subprocess.PIPE, check=True).stdout
    else:
        raise ValueError(f"compressed in an unknown way: {payload[:6].hex()}")
    if len(kernel) != expected or not kernel.startswith(b"\x7fELF"):
        raise ValueError(f"{len(kernel)} of {expected} bytes, or no ELF file")
    return kernel


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(vmlinux(Path(sys.argv[1]).read_bytes()))
