"""Two ranks on two hosts, told what to do and asked what they did."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from railscope.testbed.nccl.build import ENVIRONMENT
from tests.bench.quick_turns import RatedJob
from tests.gpu.backend_double import HANG
from tests.gpu.rails import TwoHosts
from tests.gpu.rank import END, FOREVER, LIMIT, PROGRESS, SYNCHRONIZE_EVERY, WORDS_BYTES

REPOSITORY: Final = Path(__file__).resolve().parents[2]
_START_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.001
_NOT_INHERITED: Final = ("NCCL_", "TORCH_", "PYTHONPYCACHEPREFIX")
"""Bytecode of PyTorch lies beside it, and compiling it anew takes seconds."""
_CHANGE_SECONDS: Final = 0.0002


class RanksError(RuntimeError):
    """A rank ended, did not answer, or could not do what it was told; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Two ranks that call back to back."""

    job: RatedJob
    spent: Callable[[], tuple[int, int]]
    """Calls made, and ns of CPU time that the calling threads took for them, of both ranks since the loop began."""


class Ranks:
    """Two ranks until the end of the `with` block; `join` makes their communicator, so that an agent that is told their
    pids can be there before."""

    def __init__(
        self,
        two: TwoHosts,
        folder: Path,
        backend: str,
        *,
        environment: Mapping[str, str] | None = None,
        port_offset: int = 0,
    ) -> None:
        """Nothing runs before the `with` block is entered.

        Args:
            folder: where what they say and NCCL's INFO lines go; made anew.
            backend: as tests/gpu/rank.py has it.
            port_offset: two jobs at once need two ports.
        """
        self._two = two
        self._folder = folder
        self._backend = backend
        self._environment = dict(environment or {})
        self._port = two.port + port_offset
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[socket.socket] = []
        self._waiting = [b"", b""]
        self._told = 0
        self._stack = ExitStack()

    @property
    def trains(self) -> bool:
        """Whether the backend has a framework that trains models; the double has none."""
        return ":" not in self._backend

    @property
    def pid_options(self) -> tuple[str, ...]:
        """Have an agent observe these ranks and nobody else."""
        return ("--pid", *map(str, self.pids))

    @property
    def pids(self) -> tuple[int, ...]:
        """In rank order."""
        return tuple(process.pid for process in self._processes)

    def __enter__(self) -> Self:
        """Start both, and wait until they listen.

        Raises:
            RanksError: one ended, or took too long.
        """
        self._folder.mkdir(parents=True)
        self._stack.callback(self._end)
        try:
            for rank in range(2):
                self._begin(rank)
            self.ask("tally", within_seconds=_START_SECONDS)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def join(self) -> Self:
        """Make their communicator.

        Raises:
            RanksError: it cannot be made.
        """
        address = self._two.hosts[0].addresses[0]
        self.ask("join", within_seconds=_START_SECONDS, folder=str(self._folder), address=address, port=self._port)
        return self

    def tell(self, do: str, **arguments: object) -> None:
        """Have both ranks do something, and do not wait for it."""
        self._told += 1
        line = (json.dumps({"told": self._told, "do": do, **arguments}) + "\n").encode()
        for end in self._ends:
            end.sendall(line)

    def answers(self, seconds: float = _ANSWER_SECONDS) -> list[Any]:
        """What both ranks say to what they were told last, in rank order; late answers to earlier words are dropped.

        Raises:
            RanksError: see there.
        """
        deadline = time.monotonic() + seconds
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < 2:
            for rank in {0, 1} - replies.keys():
                while rank not in replies and (line := self._line(rank)) is not None:
                    reply = json.loads(line)
                    if reply["told"] == self._told:
                        replies[rank] = reply
            failed = any("error" in reply for reply in replies.values())
            if len(replies) < 2 and not self._readable(min(deadline, time.monotonic() + 2) if failed else deadline):
                break  # whom an error of the other keeps waiting answers late or never
        errors = [f"rank {rank}: {reply['error']}" for rank, reply in sorted(replies.items()) if "error" in reply]
        silent = [f"rank {rank} does not answer; it said: {self.said(rank)}" for rank in {0, 1} - replies.keys()]
        if errors or silent:
            raise RanksError("; ".join(errors + silent))
        return [replies[rank]["value"] for rank in range(2)]

    def ask(self, do: str, *, within_seconds: float = _ANSWER_SECONDS, **arguments: object) -> list[Any]:
        """`tell`, then `answers`."""
        self.tell(do, **arguments)
        return self.answers(within_seconds)

    def info_lines(self) -> str:
        """What NCCL wrote at level INFO."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("nccl.*")))

    def said(self, rank: int) -> str:
        """The last of what a rank wrote to stdout and stderr."""
        return (self._folder / f"output.{rank}").read_text(errors="replace").strip()[-1500:]

    @contextmanager
    def looping(self, payload_bytes: int) -> Iterator[Loop]:
        """AllReduce back to back until the end of the block; paused only between operations of both ranks."""
        file = self._folder / f"loop.{payload_bytes}"
        file.write_bytes(bytes(WORDS_BYTES))
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), WORDS_BYTES) as words:
            steps = memoryview(words).cast("Q")
            made = [PROGRESS // 8, PROGRESS // 8 + 1]

            def hold() -> None:
                steps[LIMIT] = max(steps[at] for at in made) + SYNCHRONIZE_EVERY

                def together() -> bool:
                    # Whoever was past the limit before it read it stands there, and the other one comes after.
                    steps[LIMIT] = max(steps[LIMIT], *(steps[at] for at in made))
                    return all(steps[at] == steps[LIMIT] for at in made)

                self._until(together, "come to a common operation")

            def go_on() -> None:
                steps[LIMIT] = FOREVER

            def at_a_change() -> tuple[int, float]:
                now = steps[made[0]]
                self._until(lambda: steps[made[0]] != now, "make a call", _CHANGE_SECONDS)
                return steps[made[0]], time.monotonic()

            def rate(seconds: float) -> float:
                # Ranks run ahead of the GPU and wait for it now and then: from the end of one wait to that of another.
                first, began = at_a_change()
                time.sleep(seconds)
                last, ended = at_a_change()
                return (last - first) / (ended - began)

            def spent() -> tuple[int, int]:
                return sum(steps[at] for at in made), sum(steps[at + 2] for at in made)

            go_on()
            self.tell("loop", file=str(file), payload_bytes=payload_bytes)
            try:
                yield Loop(RatedJob(self.pids, rate, hold, go_on), spent)
                hold()
                steps[LIMIT] = END
                self.answers()
            finally:
                steps.release()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send one rank a signal."""
        self._processes[rank].send_signal(number)

    def _until(self, condition: Callable[[], bool], what: str, every_seconds: float = _POLL_SECONDS) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not condition():
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    raise RanksError(f"rank {rank} ended with status {process.returncode}: {self.said(rank)}")
            if time.monotonic() > deadline:
                raise RanksError(f"the ranks do not {what} within {_ANSWER_SECONDS:.0f} s")
            time.sleep(every_seconds)

    def _begin(self, rank: int) -> None:
        host = self._two.hosts[rank]
        ours, theirs = socket.socketpair()
        self._stack.callback(ours.close)
        self._ends.append(ours)
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)},
            "PYTHONPATH": str(REPOSITORY),
            "LD_LIBRARY_PATH": os.environ.get("RAILSCOPE_JOB_LIBRARY_PATH", ""),
            "NCCL_SOCKET_IFNAME": ",".join(host.rails),
            "GLOO_SOCKET_IFNAME": host.rails[0],
            "NCCL_HOSTID": f"railscope-host{rank}",
            # Two hosts on sockets, whatever this machine is: no plugin, no InfiniBand, no NVLink between "hosts".
            "NCCL_CONF_FILE": "/dev/null",
            "NCCL_NET": "Socket",
            "NCCL_NET_PLUGIN": "none",
            "NCCL_IB_DISABLE": "1",
            "NCCL_MNNVL_ENABLE": "0",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
            "NCCL_DEBUG_FILE": str(self._folder / f"nccl.{rank}"),
            **({"CUDA_VISIBLE_DEVICES": "0"} if self._backend == "torch" else {}),
            **self._double_variables(),
            **self._environment,
        }
        command = [sys.executable, "-P", "-m", "tests.gpu.rank", str(rank), str(theirs.fileno()), self._backend]
        with theirs, (self._folder / f"output.{rank}").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    host.command(*command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={name: value for name, value in variables.items() if value or name != "LD_LIBRARY_PATH"},
                    cwd=self._folder,
                    pass_fds=(theirs.fileno(),),
                )
            )

    def _double_variables(self) -> dict[str, str]:
        """What has NCCL play on the double instead of a GPU."""
        double, _, nccl = self._backend.partition(":")
        if not nccl:
            return {}
        # Not the stand-in for NVML that the agent reads: the double has one of its own.
        return {
            **ENVIRONMENT,
            "LD_LIBRARY_PATH": "",
            "LD_PRELOAD": f"{double}/libcuda-double.so",
            HANG: str(self._folder / "hang"),
        }

    def _readable(self, deadline: float) -> bool:
        """Wait until a rank has something to say; False: none has."""
        readable, _, _ = select.select(self._ends, [], [], max(0.0, deadline - time.monotonic()))
        for end in readable:
            rank = self._ends.index(end)
            received = end.recv(1 << 16)
            if not received:
                raise RanksError(f"rank {rank} has ended; it said: {self.said(rank)}")
            self._waiting[rank] += received
        return bool(readable)

    def _line(self, rank: int) -> bytes | None:
        """The next whole line that a rank has said."""
        line, newline, rest = self._waiting[rank].partition(b"\n")
        if not newline:
            return None
        self._waiting[rank] = rest
        return line

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
