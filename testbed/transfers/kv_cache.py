"""One process of a disaggregated inference: prefill writes KV caches to decode with NIXL, over TCP.

Usage: kv_cache.py prefill|decode NAME FOLDER REQUESTS PAUSE_SECONDS [DECODE…].  The folder stands for the rendezvous.
A prefill process writes a cache to each of the named decode processes in turn, so many requests to each, 0: until a
file `stop` is there.  It begins when a file `go` is, and stays until there is one `end`.  Each process leaves a report,
which is what an agent's counts are held against.  Whoever runs this may have another Python: nothing of railscope is
imported.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

LAYERS = 8
LAYER_BYTES = 128 << 10
"""Of a cache: the blocks of a layer lie apart, so a write has a descriptor for each."""
CACHE_BYTES = LAYERS * LAYER_BYTES
VALUE = 7
_PR_SET_PDEATHSIG = 1


def main(role: str, name: str, folder: Path, requests: int, pause: float, decodes: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; who started it ends it
    agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    cache = np.full(CACHE_BYTES, VALUE if role == "prefill" else 0, np.uint8)
    agent.register_memory([(cache.ctypes.data, CACHE_BYTES, 0, "")], "DRAM")
    if role == "decode":
        receive(agent, name, folder, cache)
    else:
        send(agent, name, folder, cache, requests, pause, decodes)


def receive(agent: Any, name: str, folder: Path, cache: Any) -> None:
    """Let others write, and check what is there in the end."""
    put(folder / f"{name}.address", str(cache.ctypes.data).encode())
    put(folder / f"{name}.metadata", agent.get_agent_metadata())
    get(folder / "end")
    put(folder / f"{name}.report", json.dumps({"right": bool((cache == VALUE).all())}).encode())


def send(agent: Any, name: str, folder: Path, cache: Any, requests: int, pause: float, decodes: list[str]) -> None:
    """Write to each decode process in turn, and report what was written."""
    handles = {}
    for decode in decodes:
        peer = agent.add_remote_agent(get(folder / f"{decode}.metadata"))
        there = int(get(folder / f"{decode}.address"))
        handles[decode] = agent.initialize_xfer("WRITE", layers(agent, cache.ctypes.data), layers(agent, there), peer)
    put(folder / f"{name}.ready", b"")
    get(folder / "go")
    written = dict.fromkeys(decodes, 0)
    for request in count():
        if request == requests if requests else (folder / "stop").exists():
            break
        for decode, handle in handles.items():
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(0.0005)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"a write to {decode} ended as {state}")
            written[decode] += 1
            time.sleep(pause)
    put(folder / f"{name}.report", json.dumps({"written": written, "bytes_each": CACHE_BYTES}).encode())
    get(folder / "end")


def layers(agent: Any, address: int) -> Any:
    return agent.get_xfer_descs([(address + at, LAYER_BYTES, 0) for at in range(0, CACHE_BYTES, LAYER_BYTES)], "DRAM")


def put(file: Path, content: bytes) -> None:
    partial = file.with_suffix(file.suffix + ".partial")
    partial.write_bytes(content)
    partial.rename(file)


def get(file: Path) -> bytes:
    while not file.exists():
        time.sleep(0.02)
    return file.read_bytes()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), sys.argv[6:])
