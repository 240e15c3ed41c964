"""Compile and load a BPF program with bcc, and hand its descriptors to the parent process.

    /usr/bin/python3 bcc_helper.py SOCKET < REQUEST
    /usr/bin/python3 bcc_helper.py                    prints bcc's version

Run by the system's Python, which bcc is installed for, whatever version that is: nothing but the standard library and
bcc is imported.  REQUEST is JSON: `text` and `flags` for the compiler, `programs` (name → expected attach type, 0 for
none) and `maps` (names).  SOCKET is an inherited Unix socket: the answer is one message of JSON, {"programs": [names],
"maps": [names]}, with their descriptors in that order.  Exit status 3: bcc is not installed.  Whatever else goes wrong
ends this process, with the reason on standard error.
"""

from __future__ import annotations

import array
import ctypes
import json
import signal
import socket
import sys

NO_BCC = 3

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def main() -> int:
    """Load BPF programs with bcc as the request on standard input says, and hand over their descriptors."""
    # Nobody waits for the answer of a parent that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        import bcc  # type: ignore[import-not-found]
        from bcc import BPF
    except ImportError:
        return NO_BCC
    if len(sys.argv) == 1:
        print(bcc.__version__)
        return 0
    request = json.load(sys.stdin)
    module = BPF(text=request["text"], cflags=request["flags"])
    descriptors = array.array("i")
    for name, attach_type in request["programs"].items():
        kind = {"attach_type": attach_type} if attach_type else {}
        descriptors.append(module.load_func(name, BPF.KPROBE, **kind).fd)
    for name in request["maps"]:
        # Types are given so that bcc does not make Python classes of the structs.
        descriptors.append(module.get_table(name, ctypes.c_uint32, ctypes.c_uint64).map_fd)
    answer = json.dumps({"programs": list(request["programs"]), "maps": request["maps"]}).encode()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors.tobytes())])
    return 0


if __name__ == "__main__":
    sys.exit(main())
