"""Faults of a fabric's hosts, rails and ranks, each undone at the end of its `with` block whatever happened.

    with LinkDown(fabric, host=1, rail=0):
        time.sleep(10)

A fault that is undone twice, or whose target has gone in the meantime, does no harm.  Only what a virtual machine can
really break is here: links, queues, packet filters, processes and their share of the CPU.  Sources: tc-tbf(8), nft(8),
cgroups(7), signal(7), and Linux' Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from railscope.testbed.hosts import Fabric, Host, TestbedError, run_tool
from railscope.testbed.namespaces import tcp_socket

SLOW_RATIO: Final = 0.1
_CGROUPS: Final = Path("/sys/fs/cgroup")
_STARVED_PERIOD_US: Final = 1_000_000
_SMALLEST_QUOTA_US: Final = 1000
"""The longest period and the smallest quota that the kernel takes (Linux kernel/sched/core.c)."""
_CHUNK_BYTES: Final = 64 << 10
_SOCKET_SECONDS: Final = 5.0


class Fault(ABC):
    """Something broken for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self._injected = False

    def __enter__(self) -> Self:
        self.inject()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def inject(self) -> None:
        """Break it; what was half done is undone when that fails.

        Raises:
            TestbedError: it cannot be broken here; the text says why.
        """
        self._injected = True
        try:
            self._break()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Mend it; harmless when called again, or before `inject`."""
        if self._injected:
            self._injected = False
            self._mend()

    @abstractmethod
    def _break(self) -> None: ...

    @abstractmethod
    def _mend(self) -> None:
        """Also called after a `_break` that failed half way."""


class LinkDown(Fault):
    """One host's end of a rail has no carrier."""

    def __init__(self, fabric: Fabric, host: int, rail: int) -> None:
        super().__init__()
        self._fabric, self._host, self._rail = fabric, host, rail

    def _break(self) -> None:
        self._fabric.set_link(self._host, self._rail, up=False)

    def _mend(self) -> None:
        self._fabric.set_link(self._host, self._rail, up=True)


class SlowRail(Fault):
    """What one host sends on one rail is shaped to a share of the rate that the rail had, or to a rate.

    With `in_switch` the queue is at the switch's port towards the host, where no host sees it.
    """

    def __init__(
        self, fabric: Fabric, host: int, rail: int, *, rate_mbit: int | None = None, in_switch: bool = False
    ) -> None:
        """Without a rate: to SLOW_RATIO of the rate that `Fabric.shape` (or `shape_port`) gave it before.

        Raises:
            TestbedError: no rate is given, and the rail has none.
        """
        super().__init__()
        self._shape = fabric.shape_port if in_switch else fabric.shape
        self._before_mbit = (fabric.port_rate_mbit if in_switch else fabric.rate_mbit)(host, rail)
        self._host, self._rail = host, rail
        if rate_mbit is not None:
            self._rate_mbit = rate_mbit
        elif self._before_mbit is not None:
            self._rate_mbit = max(1, round(self._before_mbit * SLOW_RATIO))
        else:
            raise TestbedError("an unshaped rail has no rate to take a share of: shape it first, or give a rate")

    def _break(self) -> None:
        self._shape(self._host, self._rail, self._rate_mbit)

    def _mend(self) -> None:
        self._shape(self._host, self._rail, self._before_mbit)


class FilteredRail(Fault):
    """A packet filter drops what one host sends to the others of one rail, or some of it; the link stays up.

    The host's own filter does it or, with `in_switch`, one in the switch that no host can see.
    """

    def __init__(
        self,
        fabric: Fabric,
        host: int,
        rail: int,
        *,
        in_switch: bool = False,
        least_bytes: int = 0,
        per_thousand: int = 1000,
    ) -> None:
        """Choose the packets.

        Args:
            fabric, host, rail: whose.
            in_switch: where they are dropped.
            least_bytes: only packets of at least this length are.
            per_thousand: so many of them, by chance.
        """
        super().__init__()
        length = f"meta length >= {least_bytes} " if least_bytes else ""
        chance = f"numgen random mod 1000 < {per_thousand} " if per_thousand < 1000 else ""
        drop = f"{length}{chance}drop"
        self._table = f"railscope_fault_{secrets.token_hex(3)}"
        if in_switch:
            self._namespace, self._family = fabric.switch, "netdev"
            device = fabric.port(host, rail)
            self._rules = f"chain drops {{ type filter hook ingress device {device} priority 0; {drop}; }}"
        else:
            self._namespace, self._family = fabric.hosts[host].namespace, "ip"
            network = f"10.77.{rail}.0/24"
            self._rules = f"chain drops {{ type filter hook output priority 0; ip daddr {network} {drop}; }}"

    def _break(self) -> None:
        if shutil.which("nft") is None:
            raise TestbedError("a filtered rail needs `nft`: install the package nftables")
        self._nft(f"table {self._family} {self._table} {{ {self._rules}; }}")

    def _mend(self) -> None:
        with contextlib.suppress(TestbedError):
            self._nft(f"delete table {self._family} {self._table}")

    def _nft(self, text: str) -> None:
        run_tool(["ip", "netns", "exec", self._namespace, "nft", "-f", "-"], text + "\n")


class Stopped(Fault):
    """A process is stopped (SIGSTOP), and goes on at the end."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def _break(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def _mend(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)


class Killed(Fault):
    """Processes die (SIGKILL), for which there is no undoing."""

    def __init__(self, *pids: int) -> None:
        super().__init__()
        self._pids = pids

    def _break(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)

    def _mend(self) -> None:
        pass


class Frozen(Fault):
    """A process's control group is frozen: by the freezer of version 1 where there is one, else by version 2."""

    def __init__(self, pid: int, *, cgroups: Path = _CGROUPS) -> None:
        super().__init__()
        self._pid = pid
        if (cgroups / "freezer").is_dir():
            root, controller, self._file, self._words = (
                cgroups / "freezer",
                "freezer",
                "freezer.state",
                ("FROZEN", "THAWED"),
            )
        else:
            root, controller, self._file, self._words = cgroups, "", "cgroup.freeze", ("1", "0")
        self._root, self._controller = root, controller
        self._folder = root / f"railscope-frozen-{secrets.token_hex(3)}"
        self._before: Path | None = None

    def _break(self) -> None:
        self._before = self._root / own_cgroup(self._pid, self._controller).lstrip("/")
        try:
            self._folder.mkdir()
            (self._folder / "cgroup.procs").write_text(str(self._pid))
            (self._folder / self._file).write_text(self._words[0])
        except OSError as error:
            raise TestbedError(f"no control group can be frozen here ({error}): this fault needs cgroups") from None

    def _mend(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / self._file).write_text(self._words[1])
        if self._before is not None:
            with contextlib.suppress(OSError):  # it has ended
                (self._before / "cgroup.procs").write_text(str(self._pid))
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class Starved(Fault):
    """A process gets hardly any CPU: a bandwidth limit of the CPU controller, version 2 or 1 of cgroups."""

    def __init__(self, pid: int, *, ratio: float = 0.001, cgroups: Path = _CGROUPS) -> None:
        """`ratio`: of one CPU, given once a second; no less than 0.001, which is 1 ms each second."""
        super().__init__()
        self._pid, self._cgroups = pid, cgroups
        self._quota_us = max(_SMALLEST_QUOTA_US, int(_STARVED_PERIOD_US * ratio))
        self._name = f"railscope-starved-{secrets.token_hex(3)}"
        self._folder: Path | None = None
        self._before: Path | None = None

    def _break(self) -> None:
        root = self._cgroups / "cpu"
        if (root / "cpu.cfs_quota_us").exists():
            limits = {"cpu.cfs_period_us": _STARVED_PERIOD_US, "cpu.cfs_quota_us": self._quota_us}
            texts = {name: str(value) for name, value in limits.items()}
            self._before = root / own_cgroup(self._pid, "cpu").lstrip("/")
        else:
            root = self._cgroups
            texts = {"cpu.max": f"{self._quota_us} {_STARVED_PERIOD_US}"}
            self._before = root / own_cgroup(self._pid, "").lstrip("/")
        folder = root / self._name
        try:
            folder.mkdir()
            self._folder = folder
            for name, text in texts.items():
                (folder / name).write_text(text)
            (folder / "cgroup.procs").write_text(str(self._pid))
        except OSError as error:
            raise TestbedError(f"no CPU controller can be used here ({error}): this fault needs cgroups") from None

    def _mend(self) -> None:
        if self._before is not None:
            with contextlib.suppress(OSError):  # it has ended
                (self._before / "cgroup.procs").write_text(str(self._pid))
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()


def own_cgroup(pid: int, controller: str) -> str:
    """Where a process is, from /proc/PID/cgroup: lines of `number:controllers:path`.

    Raises:
        TestbedError: it has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError as error:
        raise TestbedError(f"process {pid} has no control group: {error.strerror}") from None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


class ForeignTraffic(Fault):
    """A plain TCP stream of known size from one host to another on one rail, beside whatever else is there."""

    def __init__(self, source: Host, target: Host, rail: int, size_bytes: int, *, rate_mbit: int | None = None) -> None:
        """`rate_mbit`: about so fast, by pauses between writes of 64 KiB; None: as fast as it goes."""
        super().__init__()
        self._source, self._target, self._rail, self._size_bytes = source, target, rail, size_bytes
        self._pause_s = 0.0 if rate_mbit is None else _CHUNK_BYTES * 8 / (rate_mbit * 1e6)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._leave = threading.Event()
        self.sent_bytes = 0
        self.received_bytes = 0

    def wait(self, timeout_s: float) -> None:
        """Wait until everything has arrived.

        Raises:
            TestbedError: it has not.
        """
        for thread in self._threads:
            thread.join(timeout_s)
        if self.received_bytes != self._size_bytes:
            raise TestbedError(f"{self.received_bytes} of {self._size_bytes} bytes arrived within {timeout_s:g} s")

    def _break(self) -> None:
        address = self._target.addresses[self._rail]
        try:
            listener = self._keep(tcp_socket(self._target.namespace))
            listener.bind((address, 0))
            listener.listen(1)
            sender = self._keep(tcp_socket(self._source.namespace))
            sender.settimeout(_SOCKET_SECONDS)
            sender.bind((self._source.addresses[self._rail], 0))
            sender.connect(listener.getsockname())
            receiver = self._keep(listener.accept()[0])
        except OSError as error:
            raise TestbedError(f"no foreign traffic on rail {self._rail}: {error}") from None
        sender.settimeout(None)
        for work in (lambda: self._send(sender), lambda: self._receive(receiver)):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()

    def _mend(self) -> None:
        self._leave.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _keep(self, made: socket.socket) -> socket.socket:
        self._sockets.append(made)
        return made

    def _send(self, sender: socket.socket) -> None:
        chunk = bytes(_CHUNK_BYTES)
        with contextlib.suppress(OSError):  # undone before its end
            while self.sent_bytes < self._size_bytes and not self._leave.wait(self._pause_s):
                part = chunk[: self._size_bytes - self.sent_bytes]
                sender.sendall(part)
                self.sent_bytes += len(part)
            sender.shutdown(socket.SHUT_WR)

    def _receive(self, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := receiver.recv(_CHUNK_BYTES):
                self.received_bytes += len(part)
