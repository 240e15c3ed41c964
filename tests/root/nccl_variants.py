"""NCCL in the shapes in which it is met: linked into programs, hidden in frameworks, stripped, renamed, unloaded.

The library here has NCCL's names, signatures and accessors and does nothing.  Its communicator has the fields and marks
of NCCL's in places of its own, so that the table of known builds cannot know it.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.fabric.agent_process import AgentProcess
from tests.root.caller import Caller

HASH: Final = "00000000c0ffee11"
RANK, RANKS = "3", "8"
COUNT: Final = 100
FLOAT32: Final = 7

_SOURCE: Final = """
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#ifndef MAGIC
#define MAGIC 0x0280028002800280
#endif
struct ncclComm {
    uint64_t startMagic;
    char padding[4096];
    uint64_t commHash;
#ifdef FIELD_BEFORE_RANK
    uint64_t field;
#endif
    int rank, nRanks, cudaDev, nvmlDev;
    uint64_t endMagic;
};
struct ncclComm world = {.startMagic = MAGIC, .commHash = 0xc0ffee11, .rank = 3, .nRanks = 8, .endMagic = MAGIC};
uint64_t profiled;
typedef struct ncclComm *comm_t;
typedef void *buffer_t;
/* The documented name is weak and has a strong twin at the same address.  NVTX is handed the hash. */
#define NCCL(name, ...) \\
    int p##name(__VA_ARGS__) { profiled = comm ? comm->commHash : 0; return 0; } \\
    int name(__VA_ARGS__) __attribute__((weak, alias("p" #name)));
NCCL(ncclAllReduce, buffer_t send, buffer_t receive, size_t count, int type, int op, comm_t comm, void *stream)
NCCL(ncclBroadcast, buffer_t send, buffer_t receive, size_t count, int type, int root, comm_t comm, void *stream)
NCCL(ncclSend, buffer_t send, size_t count, int type, int peer, comm_t comm, void *stream)
NCCL(ncclReduceConfig, buffer_t send, buffer_t receive, size_t count, int type, int op, int root, comm_t comm,
     void *stream, void *config)
#ifdef RCCL
NCCL(ncclAllToAll, buffer_t send, buffer_t receive, size_t count, int type, comm_t comm, void *stream)
NCCL(ncclAllToAllv, buffer_t send, size_t *counts, size_t *places, buffer_t receive, size_t *receive_counts,
     size_t *receive_places, int type, comm_t comm, void *stream)
#else
const char *version(void) { return "NCCL version " VERSION "+cuda12.9"; }
#endif
#define ACCESSOR(name, field) int name(comm_t comm, int *out) { *out = comm->field; return 0; }
ACCESSOR(ncclCommCount, nRanks)
ACCESSOR(ncclCommUserRank, rank)
ACCESSOR(ncclCommCuDevice, cudaDev)
__attribute__((visibility("default"))) int framework_step(int times) {
    for (int i = 0; i < times; i++)
        ncclAllReduce(&world, &world, 100, 7, 0, &world, 0);
    return 0;
}
#ifdef PROGRAM
int main(void) {
    int times;
    puts("ready");
    fflush(stdout);
    while (scanf("%d", &times) == 1) {
        framework_step(times);
        puts("done");
        fflush(stdout);
    }
    return 0;
}
#endif
"""


def compiled(to: Path, *flags: str, version: str = "2.99.1") -> Path:
    """Compile it.  -O0 keeps every function whole and lets it begin with a push."""
    source = to.with_name(f"{to.name}.c")
    source.write_text(_SOURCE)
    command = ["gcc", "-O0", "-Wl,--build-id", f'-DVERSION="{version}"', *flags, "-o", str(to), str(source)]
    subprocess.run(command, check=True)
    return to


def library(to: Path, *flags: str, version: str = "2.99.1") -> Path:
    return compiled(to, "-shared", "-fPIC", *flags, version=version)


def program(to: Path, *flags: str) -> Path:
    return compiled(to, "-DPROGRAM", *flags)


class Program:
    """A started program that makes calls when it is told to; ended on exit."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert self._answer() == "ready"
        except AssertionError:
            self.__exit__()
            raise
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.pid = int(children[0]) if children else pid
        """The process that was started or, where that one only waits for a child, the child."""

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def call(self, times: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{times}\n")
        self.process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class LateCaller(Caller):
    """A process that loads and unloads libraries while it runs."""

    def __init__(self) -> None:
        super().__init__(Path("libc.so.6"))

    def load(self, path: Path) -> None:
        self._ask(f"globals().update(library=ctypes.CDLL({str(path)!r}))")

    def unload(self) -> None:
        """Close the library that was loaded last."""
        self._ask("__import__('_ctypes').dlclose(library._handle)")

    def step(self, times: int) -> None:
        """So many AllReduce of `COUNT` elements of type float32."""
        self.call("framework_step", 1, times)

    def world(self) -> int:
        """Address of the communicator that the library has."""
        return int(self._ask("ctypes.addressof(ctypes.c_char.in_dll(library, 'world'))"))


def totals(agent: AgentProcess) -> dict[str, tuple[int, int]]:
    """Calls and payload bytes by operation."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for place, name in enumerate(("calls", "payload_bytes")):
        for labels, value in agent.samples(f"railscope_collective_{name}_total"):
            sums[labels["op"]][place] += int(value)
    return {op: (calls, payload_bytes) for op, (calls, payload_bytes) in sums.items() if calls}


def probed(agent: AgentProcess, folder: Path) -> dict[str, str]:
    """Libraries below a folder whose calls are probed, with their NCCL versions."""
    return {
        labels["library"]: labels["nccl_version"]
        for labels, value in agent.samples("railscope_probe_attached", program="calls")
        if labels["library"].startswith(str(folder)) and value == 1
    }


def layout_sources(agent: AgentProcess) -> dict[str, str]:
    """How the layout of each library is known."""
    return {labels["library"]: labels["layout_source"] for labels, _ in agent.samples("railscope_probe_layout_info")}


def log_of(agent: AgentProcess) -> str:
    """What the agent has said; ends it."""
    agent.process.terminate()
    agent.process.wait(10)
    assert agent.process.stderr is not None
    return agent.process.stderr.read()
