"""One end of a transfer with Mooncake over TCP: `give` writes blocks into the memory of `take`.

Usage: mooncake_ends.py give|take FOLDER ADDRESS BLOCKS BLOCK_BYTES.  The folder stands for the rendezvous: `give` waits
there for `go`, and both for `end`.  `give` writes each block by itself; then, when there is `batch`, all of them once
more as one batch.  Each prints what it did.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

from tests.waiting import eventually


def main(who: str, folder: Path, address: str, blocks: int, block_bytes: int) -> None:
    engine = TransferEngine()
    assert engine.initialize(address, "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.full(block_bytes, 7 if who == "give" else 0, np.uint8)
    assert engine.register_memory(memory.ctypes.data, block_bytes) == 0
    if who == "take":
        put(folder / "address", f"{address}:{engine.get_rpc_port()} {memory.ctypes.data}".encode())
        get(folder / "done")
        print("right" if (memory == 7).all() else "wrong", flush=True)
    else:
        peer, there = get(folder / "address").decode().split()
        put(folder / "ready", b"")
        get(folder / "go")
        for _ in range(blocks):
            assert engine.transfer_sync_write(peer, memory.ctypes.data, int(there), block_bytes) == 0
        put(folder / "singles", b"")
        get(folder / "batch")
        each, total = block_bytes // blocks, block_bytes // blocks * blocks
        here = [memory.ctypes.data + at for at in range(0, total, each)]
        to = [int(there) + at for at in range(0, total, each)]
        assert engine.batch_transfer_sync_write(peer, here, to, [each] * blocks) == 0
        print(f"wrote {blocks} of {block_bytes} and {blocks} of {each}", flush=True)
        put(folder / "done", b"")
    get(folder / "end")


def put(file: Path, content: bytes) -> None:
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(file)


def get(file: Path) -> bytes:
    eventually(file.exists)
    return file.read_bytes()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
