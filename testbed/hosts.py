"""Hosts and rails made of network namespaces, so that a fabric exists on any Linux machine.

A fabric is N hosts with R rails each.  Host h is a network namespace with one veth pair a rail, `rail0`, `rail1`, …,
whose other ends sit in a switch namespace, one bridge a rail: a rail-optimised fabric, where rail r of every host
reaches rail r of every other host and nothing else.  Addresses are 10.77.<rail>.<host+1>/24.  IPv6 is off, so that
an idle rail's counters stand still.  Sources: ip-link(8), ip-netns(8), tc-tbf(8).

With `management` every host also has a network beside the rails, as real ones do: `mgmt0`, 10.78.0.<host+1>/24, on a
bridge of the switch namespace whose own address is 10.78.0.254.  What watches the hosts runs there and still reaches
them when a rail does not.

`ip` and `tc` are started for it.  pyroute2 was tried instead: it sends each device in messages of its own where one
`ip -batch` makes those of a whole host, so that two hosts with two rails took 71 ms at best and 120 ms on a busy
machine, against 18 and 95; importing it costs 0.1 s of CPU more.  It is quicker only for one change to what is there
(2 ms against 5), and `ip netns exec` would stay: a process on a host is started by it.

Names carry a random suffix, so that fabrics of several owners live side by side.  Who owns a fabric is written to
`/run/railscope/testbed/<suffix>`, and `remove_leftovers` takes away what owners left that were killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

from railscope.testbed.namespaces import NAMESPACES_DIRECTORY

OWNERS_DIRECTORY: Final = Path("/run/railscope/testbed")
NAME_PREFIX: Final = "railscope-"
MAXIMUM_HOSTS: Final = 250
MAXIMUM_RAILS: Final = 8
MANAGEMENT_DEVICE: Final = "mgmt0"
MANAGEMENT_SWITCH_ADDRESS: Final = "10.78.0.254"


class TestbedError(Exception):
    """The testbed cannot do what was asked; the text is one line that says what to do."""

    __test__ = False  # pytest would take the name for a test's


@dataclass(frozen=True, slots=True)
class Host:
    """One host: a network namespace with its rails."""

    index: int
    namespace: str
    """Name below /run/netns, as `ip netns exec` wants it."""
    rails: tuple[str, ...]
    """Names of the rails' network devices, inside the namespace."""
    addresses: tuple[str, ...]
    """IPv4 address of each rail."""
    management_address: str | None = None
    """IPv4 address of `mgmt0`; None: the fabric has no management network."""

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs `arguments` on this host; the process keeps its pid (ip-netns executes it)."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@dataclass(frozen=True, slots=True)
class RailCounters:
    """What the kernel counted on one rail of one host since the rail was made."""

    transmit_bytes: int
    receive_bytes: int
    transmit_packets: int
    receive_packets: int


class Fabric:
    """Hosts and rails for as long as the `with` block lasts; made on entry, removed on exit whatever happened.

    While it lives in the main thread and SIGTERM has no handler of the caller's, SIGTERM raises SystemExit(143), so
    that the block is left in order.
    """

    def __init__(self, hosts: int = 2, rails: int = 2, *, management: bool = False) -> None:
        if not 1 <= hosts <= MAXIMUM_HOSTS:
            raise TestbedError(f"a fabric has 1 to {MAXIMUM_HOSTS} hosts, not {hosts}")
        if not 1 <= rails <= MAXIMUM_RAILS:
            raise TestbedError(f"a fabric has 1 to {MAXIMUM_RAILS} rails, not {rails}")
        self.suffix: Final = secrets.token_hex(3)
        self.rail_names: Final = tuple(f"rail{rail}" for rail in range(rails))
        self.hosts: Final = tuple(
            Host(
                index,
                f"{NAME_PREFIX}{self.suffix}-host{index}",
                self.rail_names,
                tuple(f"10.77.{rail}.{index + 1}" for rail in range(rails)),
                f"10.78.0.{index + 1}" if management else None,
            )
            for index in range(hosts)
        )
        self.switch: Final = f"{NAME_PREFIX}{self.suffix}-switch"
        self._rates_mbit: dict[tuple[str, str], int] = {}
        self._sigterm = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Make the fabric (about 0.1 s for two hosts).

        Raises:
            TestbedError: not root, `ip` is missing, or the kernel refused.
        """
        require_root_and_ip()
        remove_leftovers()
        self._sigterm.enter_context(_sigterm_as_exit())
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces and end what still runs in them; harmless when called again."""
        with _signals_held():
            _remove(self.suffix)
        self._sigterm.close()

    def shape(self, host: int, rail: int, rate_mbit: int | None) -> None:
        """Limit what one host sends on one rail, in Mbit/s; None takes the limit away."""
        self._limit(self.hosts[host].namespace, self.rail_names[rail], rate_mbit)

    def shape_port(self, host: int, rail: int, rate_mbit: int | None) -> None:
        """Limit what the switch sends to one host on one rail, in Mbit/s: no host sees the queue."""
        self._limit(self.switch, self.port(host, rail), rate_mbit)

    def rate_mbit(self, host: int, rail: int) -> int | None:
        """What `shape` has set; None: no limit."""
        return self._rates_mbit.get((self.hosts[host].namespace, self.rail_names[rail]))

    def port_rate_mbit(self, host: int, rail: int) -> int | None:
        """What `shape_port` has set; None: no limit."""
        return self._rates_mbit.get((self.switch, self.port(host, rail)))

    def port(self, host: int, rail: int) -> str:
        """The switch's end of a rail: a device in the switch namespace."""
        return f"host{host}{self.rail_names[rail]}"

    def _limit(self, namespace: str, device: str, rate_mbit: int | None) -> None:
        """Set, change or remove a token bucket; the smallest that was steady: with 32 kB and 50 ms TCP stalled for
        seconds."""
        if rate_mbit is not None:
            limit = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "128kb", "latency", "200ms"]
            run_tool(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit])
            self._rates_mbit[namespace, device] = rate_mbit
        elif (namespace, device) in self._rates_mbit:
            run_tool(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])
            del self._rates_mbit[namespace, device]

    def set_link(self, host: int, rail: int, *, up: bool) -> None:
        """Take one host's end of a rail down or up; TCP goes on about 1.5 s after it is up again."""
        run_tool(["ip", "-n", self.hosts[host].namespace, "link", "set", self.rail_names[rail], "up" if up else "down"])

    def counters(self, host: int, rail: int) -> RailCounters:
        """Read one rail's counters from the kernel (IFLA_STATS64)."""
        answer = run_tool(["ip", "-n", self.hosts[host].namespace, "-s", "-j", "link", "show", self.rail_names[rail]])
        stats = json.loads(answer)[0]["stats64"]
        return RailCounters(stats["tx"]["bytes"], stats["rx"]["bytes"], stats["tx"]["packets"], stats["rx"]["packets"])

    def _make(self) -> None:
        OWNERS_DIRECTORY.mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        (OWNERS_DIRECTORY / self.suffix).write_text(f"{pid} {_start_ticks(pid)} {_pid_namespace()}\n")
        namespaces = [self.switch, *(host.namespace for host in self.hosts)]
        _batch([f"netns add {name}" for name in namespaces])
        for name in namespaces:
            run_tool(["ip", "netns", "exec", name, "sh", "-c", _QUIET_AND_STEADY])
        switch = ["link set lo up"]
        for rail in range(len(self.rail_names)):
            switch += [f"link add bridge{rail} type bridge stp_state 0 mcast_snooping 0", f"link set bridge{rail} up"]
        if self.hosts[0].management_address is not None:
            switch += [
                "link add management type bridge stp_state 0 mcast_snooping 0",
                f"address add {MANAGEMENT_SWITCH_ADDRESS}/24 dev management",
                "link set management up",
            ]
        for host in self.hosts:
            for rail, name in enumerate(host.rails):
                port = self.port(host.index, rail)
                switch += [
                    f"link add {port} type veth peer name {name} netns {host.namespace}",
                    f"link set {port} master bridge{rail} up",
                ]
            if host.management_address is not None:
                port = f"host{host.index}mgmt"
                switch += [
                    f"link add {port} type veth peer name {MANAGEMENT_DEVICE} netns {host.namespace}",
                    f"link set {port} master management up",
                ]
        _batch(switch, namespace=self.switch)
        for host in self.hosts:
            lines = ["link set lo up"]
            for name, address in zip(host.rails, host.addresses, strict=True):
                lines += [f"address add {address}/24 dev {name}", f"link set {name} up"]
            if host.management_address is not None:
                lines += [f"address add {host.management_address}/24 dev {MANAGEMENT_DEVICE}"]
                lines += [f"link set {MANAGEMENT_DEVICE} up"]
            _batch(lines, namespace=host.namespace)


_QUIET_AND_STEADY: Final = """
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -e $file ] || echo 1 >$file; done
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
"""
"""Settings of a new namespace, before the links exist that inherit them.  A kernel may lack IPv6; reno is the one
congestion control that every kernel has and lets a namespace choose.  A machine's default may be BBR, which paces by
what it measured, and on a busy machine that is the scheduler, not the rail."""


def require_root_and_ip() -> None:
    """Check what every fabric of namespace hosts needs.

    Raises:
        TestbedError: says which of the two is missing.
    """
    if os.geteuid() != 0:
        raise TestbedError("the testbed makes network namespaces and needs root: run it with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise TestbedError(f"the testbed needs `{missing[0]}`: install the package iproute2")


def remove_leftovers() -> list[str]:
    """Remove namespace hosts whose owner has died without cleaning up; returns the suffixes of those removed."""
    removed = []
    for record in sorted(OWNERS_DIRECTORY.glob("*")):
        try:
            pid, start_ticks, pid_namespace = map(int, record.read_text().split())
        except (OSError, ValueError):
            continue  # its owner is writing it, or has just removed it
        if pid_namespace == _pid_namespace() and _start_ticks(pid) != start_ticks:
            _remove(record.name)
            removed.append(record.name)
    return removed


def _remove(suffix: str) -> None:
    """Remove one fabric: first what runs in it, else the namespaces would live on without a name."""
    for path in sorted(NAMESPACES_DIRECTORY.glob(f"{NAME_PREFIX}{suffix}-*")):
        for pid in subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True).stdout.split():
            if int(pid) != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True)
    (OWNERS_DIRECTORY / suffix).unlink(missing_ok=True)


def _pid_namespace() -> int:
    """Whose numbers are pids: another namespace's owners cannot be looked up, and are left alone."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (field 22 of proc(5)'s stat); None: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _batch(lines: Sequence[str], namespace: str | None = None) -> None:
    """Give `ip` many commands at once: one process instead of dozens."""
    where = ["-n", namespace] if namespace is not None else []
    run_tool(["ip", *where, "-batch", "-"], "\n".join(lines) + "\n")


def run_tool(command: Sequence[str], text: str = "") -> str:
    """Run a command to its end, `text` on its standard input, and return its output.

    Raises:
        TestbedError: it failed; the text quotes its first complaint.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise TestbedError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, unless somebody else handles it or we may not say (signal.signal, main thread)."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while cleaning up, so that a second Ctrl-C does not leave half of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
