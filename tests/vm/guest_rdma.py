"""Inside a virtual machine: two soft-RoCE devices on a pair of network devices, traffic between them, and faults.

python3 -m tests.vm.guest_rdma
"""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from railscope.agent.node.fabric.queue_pairs import QueuePairs, ask_kernel
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.counters import CounterReading
from railscope.probes.rdma.counters import RdmaCounters
from railscope.probes.rdma.inventory import read_ports
from railscope.probes.rdma.netlink import RdmaNetlink
from tests.vm.soft_roce import GID_INDEX, SYSFS, Pair, made, run, wait_for

SENDER: Final = "rxe0"
RECEIVER: Final = "rxe1"
MESSAGES: Final = 500
MESSAGE_BYTES: Final = 4096
LOSS_PERCENT: Final = 5
_NETDEVS: Final = {SENDER: "eth0", RECEIVER: "eth1"}
_WAIT_17_SECONDS: Final = 22
_WAIT_HALF_A_SECOND: Final = 17
"""How long a sender waits for an answer before it sends again: 4 µs times two to the power of this.  ib_send_bw's own
67 ms pass without one on a processor that is emulated and shared."""
_MOST_SECONDS: Final = 60


def main() -> None:
    print(json.dumps(try_soft_roce()))


def try_soft_roce() -> dict[str, Any]:
    """Ports, and what the counters moved by: of clean traffic, of traffic with loss, and of a link going down."""
    with made([Pair((SENDER, RECEIVER), (_NETDEVS[SENDER], _NETDEVS[RECEIVER]))]):
        return _try_devices()


def _try_devices() -> dict[str, Any]:
    seen: dict[str, Any] = {"ports": _ports()}
    with closing(RdmaCounters(SYSFS, SystemClock())) as plain:
        netlink = RdmaNetlink()
        with closing(RdmaCounters(SYSFS, SystemClock(), netlink=netlink)) as requested:
            first = plain.read()
            seen["unreadable"] = [asdict(failure) for failure in first.failed]
            seen["counts_bytes"] = _counts_bytes(first)
            before = _rows(first)
            _send(_WAIT_17_SECONDS)
            after = _rows(plain.read())
            seen["traffic"] = _moved(before, after)
            seen["sysfs"] = _hw_counters()
            seen["read"] = after
            seen["netlink"] = _rows(requested.read())
            seen["queue_pairs"] = _queue_pairs()
            run("tc", "qdisc", "add", "dev", _NETDEVS[SENDER], "root", "netem", "loss", f"{LOSS_PERCENT}%")
            _send(_WAIT_HALF_A_SECOND)
            lossy = _rows(plain.read())
            seen["loss"] = _moved(after, lossy)
            run("ip", "link", "set", _NETDEVS[SENDER], "down")
            wait_for(SENDER, up=False)
            seen["down"] = _moved(lossy, _rows(plain.read()))
            seen["ports_down"] = _ports()
    return seen


def _send(wait: int) -> None:
    """Send `MESSAGES` messages of `MESSAGE_BYTES` from the one device to the other."""
    command = ["ib_send_bw", "-x", GID_INDEX, "-F", "-n", str(MESSAGES), "-s", str(MESSAGE_BYTES), "-u", str(wait)]
    with subprocess.Popen(
        [*command, "-d", RECEIVER], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        deadline = time.monotonic() + _MOST_SECONDS
        while True:
            client = subprocess.run(
                [*command, "-d", SENDER, "127.0.0.1"], capture_output=True, text=True, timeout=_MOST_SECONDS
            )
            refused = "Couldn't connect" in client.stdout + client.stderr
            if not refused or server.poll() is not None or time.monotonic() > deadline:
                break
        if client.returncode != 0:
            server.kill()
        said, _ = server.communicate(timeout=_MOST_SECONDS)
    if client.returncode != 0 or server.returncode != 0:
        raise RuntimeError(f"ib_send_bw: {client.stdout}{client.stderr}\nits server: {said}")


def _queue_pairs() -> dict[str, Any]:
    """Queue pairs while ib_send_bw sends over a connected one, and the processes that it really is."""
    command = ["ib_send_bw", "-x", GID_INDEX, "-F", "-D", str(_MOST_SECONDS), "-s", str(MESSAGE_BYTES)]
    watch = QueuePairs(SystemClock(), ask_kernel(Path("/proc")))
    with ExitStack() as stack:

        def start(*more: str) -> subprocess.Popen[bytes]:
            quiet = subprocess.DEVNULL
            running = stack.enter_context(subprocess.Popen([*command, *more], stdout=quiet, stderr=quiet))
            stack.callback(running.kill)
            return running

        server = start("-d", RECEIVER)
        client = start("-d", SENDER, "127.0.0.1")
        deadline = time.monotonic() + _MOST_SECONDS
        while True:
            reading = watch.read()
            if len([one for one in reading.counts if one.state == "connected"]) == 2 or time.monotonic() > deadline:
                break
            if client.poll() is not None and server.poll() is None:
                client = start("-d", SENDER, "127.0.0.1")  # the server did not listen yet
            time.sleep(0.2)
        return {"read": asdict(reading), "pids": {SENDER: client.pid, RECEIVER: server.pid}}


def _ports() -> dict[str, Any]:
    return {port.device: {**asdict(port), "up": port.up} for port in read_ports(SYSFS)}


def _counts_bytes(reading: CounterReading) -> dict[str, bool]:
    """By port, whether the reading claims any bytes of it."""
    columns = [reading.fields.index(name) for name in ("tx_bytes", "rx_bytes")]
    assert reading.shape is not None
    return {name: bool(reading.shape.known[row, columns].any()) for row, name in enumerate(reading.names)}


def _rows(reading: CounterReading) -> dict[str, dict[str, int]]:
    """By port, all counters by name."""
    return {
        name: dict(zip(reading.fields, reading.values[row].tolist(), strict=True))
        for row, name in enumerate(reading.names)
    }


def _moved(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """What moved, and by how much."""
    return {
        port: {name: value - before[port][name] for name, value in counters.items() if value != before[port][name]}
        for port, counters in after.items()
    }


def _hw_counters() -> dict[str, dict[str, int]]:
    """By port, the kernel's files as they are."""
    folders = {device: SYSFS / "class/infiniband" / device / "ports/1/hw_counters" for device in _NETDEVS}
    return {
        f"{device}/1": {file.name: int(file.read_text()) for file in folder.iterdir() if file.name != "lifespan"}
        for device, folder in folders.items()
    }


if __name__ == "__main__":
    main()
