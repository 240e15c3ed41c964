"""One end of a disaggregated inference: prefill writes its cache to decode with NIXL, over TCP, block by block.

Usage: kv_cache.py prefill|decode FOLDER BLOCKS BLOCK_BYTES.  The folder stands for the rendezvous; both wait there:
prefill for `go`, decode for `done`.  Each prints what it did.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]


def main(who: str, folder: Path, blocks: int, block_bytes: int) -> None:
    agent: Any = nixl_agent(who, nixl_agent_config(backends=["UCX"]))
    cache = np.full(block_bytes, 7 if who == "prefill" else 0, np.uint8)
    agent.register_memory([(cache.ctypes.data, block_bytes, 0, "")], "DRAM")
    if who == "decode":
        put(folder / "address", str(cache.ctypes.data).encode())
        put(folder / "decode", agent.get_agent_metadata())
        get(folder / "done")
        print("right" if (cache == 7).all() else "wrong", flush=True)
        return
    peer = agent.add_remote_agent(get(folder / "decode"))
    there = int(get(folder / "address"))
    here = agent.get_xfer_descs([(cache.ctypes.data, block_bytes, 0)], "DRAM")
    handle = agent.initialize_xfer("WRITE", here, agent.get_xfer_descs([(there, block_bytes, 0)], "DRAM"), peer)
    put(folder / "ready", b"")
    get(folder / "go")
    for _ in range(blocks):
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0005)
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
    print(f"wrote {blocks} of {block_bytes}", flush=True)
    put(folder / "done", b"")
    get(folder / "end")


def put(file: Path, content: bytes) -> None:
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(file)


def get(file: Path) -> bytes:
    while not file.exists():
        time.sleep(0.02)
    return file.read_bytes()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
