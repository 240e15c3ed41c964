"""NCCL's commHash from the unique id that a communicator was made with.

All ranks of a communicator are given the same 128 bytes, and NCCL hashes them into the name that it prints and keeps
in `struct ncclComm`.  Where that structure is not known, the arguments of the init call still name the communicator.
Communicators that were split off, shrunk or grown have names made in other ways, which are not followed here.

Sources: `getHash` in NCCL's src/misc/utils.cc (to 2.22) and src/include/bitops.h (from 2.23), and its caller in
src/init.cc.  To 2.25 it is DJB2a; from 2.26 on two lanes of 64 bits are mixed.
"""

from __future__ import annotations

import platform
import struct
from typing import Final

UNIQUE_ID_BYTES: Final = 128

_MASK: Final = (1 << 64) - 1
_DJB_START: Final = 5381
_CHARACTER: Final = "B" if platform.machine() == "aarch64" else "b"
"""Format of C's `char`: unsigned on Arm, signed on x86."""
_LANE_MULTIPLIERS: Final = (0x9DE62BBC8CEF3CE3, 0x485CD6311B599E79)
_DIGEST_MULTIPLIERS: Final = (0xBAC3BD562846DE6B, 0x995A187A14E7B445)
_FIRST_WITH_LANES: Final = (2, 26)


def comm_hash(unique_id: bytes, nccl_version: str) -> int | None:
    """The commHash that this version (`2.27.7`) gives to a communicator; None where the version is not known.

    Raises:
        ValueError: the id has not 128 bytes.
    """
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
    numbers = nccl_version.split(".")
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers[:2]):
        return None
    version = int(numbers[0]), int(numbers[1])
    return two_lane_hash(unique_id) if version >= _FIRST_WITH_LANES else djb2a_hash(unique_id)


def djb2a_hash(data: bytes) -> int:
    """NCCL's older hash: times 33, exclusive or with the byte, which C takes as signed on x86 and as unsigned on Arm.

    An id that NCCL made is random bytes, so that the sign matters; the processor is the one that runs NCCL.
    """
    result = _DJB_START
    for byte in struct.unpack(f"{len(data)}{_CHARACTER}", data):
        result = (result * 33 ^ byte) & _MASK
    return result


def two_lane_hash(data: bytes) -> int:
    """NCCL's newer hash: two accumulators that stir each other before each word of eight bytes, zeros fill the last."""
    first, second = 1 ^ len(data), 1
    for at in range(0, len(data), 8):
        first = (first + second) & _MASK
        second ^= first
        first = (first ^ first >> 31) * _LANE_MULTIPLIERS[0] & _MASK
        second = (second ^ second >> 32) * _LANE_MULTIPLIERS[1] & _MASK
        first = (first + int.from_bytes(data[at : at + 8], "little")) & _MASK
    digest = (first ^ first >> 31) * _DIGEST_MULTIPLIERS[0] & _MASK
    digest = (digest + second) & _MASK
    return (digest ^ digest >> 32) * _DIGEST_MULTIPLIERS[1] & _MASK
