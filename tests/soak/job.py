"""A short job: `python tests/soak/job.py LIBRARY CALLS`, started in a network namespace whose loopback is up.

It has a communicator of one rank, calls it, lets go of it, and ends.  It imports nothing of railscope's, for many of
them start.
"""

from __future__ import annotations

import ctypes
import os
import sys

FLOAT32, SUM = 7, 0
ELEMENTS = 256


class UniqueId(ctypes.Structure):
    """ncclUniqueId of nccl.h."""

    _fields_ = (("internal", ctypes.c_char * 128),)


def main(library: str, calls: int) -> None:
    """Raises AssertionError where a call fails."""
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    nccl = ctypes.CDLL(library)
    identity, communicator = UniqueId(), ctypes.c_void_p()
    assert nccl.ncclGetUniqueId(ctypes.byref(identity)) == 0
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 1, identity, 0) == 0
    data = (ctypes.c_float * ELEMENTS)()
    count = ctypes.c_size_t(ELEMENTS)
    for _ in range(calls):
        assert nccl.ncclAllReduce(data, data, count, FLOAT32, SUM, communicator, None) == 0
    assert nccl.ncclCommDestroy(communicator) == 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
