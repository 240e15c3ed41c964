"""Soft-RoCE devices on pairs of network devices, inside a virtual machine.

Both ends of a pair are in one network namespace, so the kernel is told to accept its own addresses from outside.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.rdma.inventory import read_ports

SYSFS: Final = Path("/sys")
GID_INDEX: Final = "1"
"""Of the IPv4 address among a port's."""
_MOST_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Pair:
    """Two RDMA devices that reach each other."""

    devices: tuple[str, str]
    netdevs: tuple[str, str]
    """What they send through: the ends of a veth pair."""
    subnet: int = 0
    """10.77.SUBNET.0/24."""


@contextmanager
def made(pairs: Sequence[Pair]) -> Iterator[None]:
    """Have these devices, up; they are taken away when the block ends."""
    run("modprobe", "-a", "rdma_rxe", "veth", "sch_netem")
    with ExitStack() as stack:
        for pair in pairs:
            first, second = pair.netdevs
            run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
            stack.callback(run, "ip", "link", "del", first)
            for name in ("all", *pair.netdevs):
                folder = Path("/proc/sys/net/ipv4/conf", name)
                (folder / "accept_local").write_text("1")
                (folder / "rp_filter").write_text("0")
            for host, netdev in enumerate(pair.netdevs, start=1):
                run("ip", "address", "add", f"10.77.{pair.subnet}.{host}/24", "dev", netdev)
                run("ip", "link", "set", netdev, "up")
            for device, netdev in zip(pair.devices, pair.netdevs, strict=True):
                run("rdma", "link", "add", device, "type", "rxe", "netdev", netdev)
                stack.callback(run, "rdma", "link", "delete", device)
                wait_for(device, up=True)
        yield


def wait_for(device: str, *, up: bool) -> None:
    """Wait until a device's port is up, or down.

    Raises:
        RuntimeError: it does not become so.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    while (port := {port.device: port for port in read_ports(SYSFS)}[device]).up is not up:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{device} does not go {'up' if up else 'down'}: {port}")
        time.sleep(0.05)


def run(*command: str) -> None:
    """Run a tool.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout.strip()}")
