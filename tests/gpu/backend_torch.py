"""Collectives of PyTorch over NCCL on a real GPU.

The process group is PyTorch's own, so a call goes the way that every training job's does.  Collectives that are not
asynchronous run on the current stream (PyTorch 2.7 and newer).  With `device="cpu"` the same code runs over Gloo, which
shows no more than that it fits PyTorch's interfaces.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.backend import Call, Identity

_TYPES: Final = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "u8": torch.uint8,
}
_RANKS: Final = 2
_WIDTH: Final = 1024
_LAYERS: Final = 4
_CYCLES_PER_SECOND: Final = 2.0e9
"""Of torch.cuda._sleep, at the least: an H100 or H200 runs at up to 1.98 GHz."""
_AHEAD_CYCLES: Final = 400_000
"""Some 0.2 ms: what is enqueued meanwhile stands ready when the first event is reached."""


class TorchBackend:
    """See tests/gpu/backend.py."""

    def __init__(self, rank: int, device: str = "cuda") -> None:
        self._rank = rank
        self._cuda = device == "cuda"
        self._device = torch.device("cuda", 0) if self._cuda else torch.device("cpu")
        if self._cuda:
            torch.cuda.set_device(self._device)
        self._buffers: dict[tuple[str, int, str], torch.Tensor] = {}
        self._kept: list[Any] = []
        self._graph: Any = None
        self._step: Callable[[], None] | None = None

    def join(self, folder: str, address: str, port: int) -> None:  # noqa: ARG002
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=self._rank,
            world_size=_RANKS,
            timeout=datetime.timedelta(seconds=120),
            device_id=self._device if self._cuda else None,
        )

    def identity(self) -> Identity:
        if not self._cuda:
            return Identity("", 0)
        version = _loaded_nccl_version()
        group = dist.distributed_c10d._get_default_group()._get_backend(self._device)
        return Identity(version, int(getattr(group, "_comm_ptr", lambda: 0)()))

    def enqueue(self, calls: Sequence[Call]) -> None:
        alike = {(call.operation, call.data_type) for call in calls}
        # PyTorch coalesces collectives of one kind.
        if self._cuda and len(calls) > 1 and len(alike) == 1 and calls[0].operation == "AllReduce":
            with dist._coalescing_manager():
                for call in calls:
                    self._call(call)
            return
        for call in calls:
            self._call(call)

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def timed(self, call: Call) -> float:
        if not self._cuda:
            began = time.perf_counter()
            self._call(call)
            return (time.perf_counter() - began) * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_AHEAD_CYCLES)
        first.record()
        self._call(call)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    def capture(self, calls: Sequence[Call]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for call in calls:
                self._call(call)

    def replay(self) -> None:
        self._graph.replay()

    def occupy(self, seconds: float) -> None:
        if self._cuda:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
        else:
            time.sleep(seconds)

    def abort(self) -> None:
        if self._rank == 0:
            self._call(Call("AllReduce", 1024, "f32"))
            time.sleep(0.5)
        else:
            time.sleep(1.5)  # rank 0 aborts what is under way, and not what a lost peer has failed
        dist.distributed_c10d._abort_process_group()

    def pinned(self, content: bytes) -> int:
        memory = torch.empty(len(content), dtype=torch.uint8, pin_memory=self._cuda)
        ctypes.memmove(memory.data_ptr(), content, len(content))
        self._kept.append(memory)
        return int(memory.data_ptr())

    def ask(self, times: int) -> dict[str, int]:
        if not self._cuda:
            return {}
        stream = torch.cuda.current_stream()
        event = torch.cuda.Event()
        queries = 0
        for _ in range(times):
            self._call(Call("AllReduce", 256, "f32"))
            event.record()
            done = False
            while not done:
                done = event.query()
                queries += 1
                time.sleep(0.0005)
            stream.synchronize()
        return {"cuEventQuery": queries, "cuStreamSynchronize": times}

    def build(self, kind: str) -> int:
        torch.manual_seed(7)
        layers: list[nn.Module] = []
        for _ in range(_LAYERS):
            layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
        model: nn.Module = nn.Sequential(*layers).to(self._device)
        size: int = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[0] if self._cuda else None)
        elif kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for layer in list(model.children())[::2]:
                fully_shard(layer)
            fully_shard(model)
        elif kind == "tp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh(self._device.type, (_RANKS,))
            plan = {str(2 * layer): (RowwiseParallel, ColwiseParallel)[layer % 2 == 0]() for layer in range(_LAYERS)}
            model = parallelize_module(model, mesh, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(64, _WIDTH, device=self._device)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            self.synchronize()

        self._step = step
        return size

    def train(self, steps: int) -> list[float]:
        if self._step is None:
            raise RuntimeError("no model was built")
        took = []
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            took.append(time.perf_counter() - began)
        return took

    def _buffer(self, name: str, count: int, data_type: str) -> torch.Tensor:
        """Zeros that stay: collectives of zeros stay zeros, and none is freed while a graph or a kernel may use it."""
        key = (name, count, data_type)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(count, dtype=_TYPES[data_type], device=self._device)
        return self._buffers[key]

    def _call(self, call: Call) -> None:
        one = self._buffer("one", call.count, call.data_type)
        if call.operation == "AllReduce":
            dist.all_reduce(one)
        elif call.operation == "Broadcast":
            dist.broadcast(one, 0)
        elif call.operation == "Reduce":
            dist.reduce(one, 0)
        elif call.operation == "SendRecv":
            other = self._buffer("other", call.count, call.data_type)
            peer = 1 - self._rank
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, one, peer), dist.P2POp(dist.irecv, other, peer)]
            ):
                work.wait()
        else:
            every = self._buffer("every", call.count * _RANKS, call.data_type)
            if call.operation == "AllGather":
                dist.all_gather_into_tensor(every, one)
            elif call.operation == "ReduceScatter":
                dist.reduce_scatter_tensor(one, every)
            else:
                dist.all_to_all_single(self._buffer("changed", call.count * _RANKS, call.data_type), every)


def _loaded_nccl_version() -> str:
    """Of the library that is mapped; what PyTorch tells is what it was built with."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libnccl.so"):
            number = ctypes.c_int()
            ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
            return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"
    return "unknown"
