"""Inside a virtual machine: a real NFS export over a rail, a checkpoint there and back, and who owns the bytes.

    python3 -m tests.vm.guest_nfs

The kernel's server runs in a network namespace, the kernel's client beside the agent.  The client's sockets are held by
no process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.fabric.agent_process import AgentProcess
from tests.vm.guest_owners import AGENT
from tests.vm.soft_roce import run

RAIL: Final = "rail0"
CLIENT: Final = "10.88.0.1"
SERVER: Final = "10.88.0.2"
CHECKPOINT_BYTES: Final = 48 << 20
_NAMESPACE: Final = "storage"
_MOUNT: Final = Path("/mnt")
_MOST_SECONDS: Final = 180
_SERVE: Final = """
mount -t nfsd nfsd /proc/fs/nfsd &&
exportfs -i -o rw,no_root_squash,no_subtree_check,insecure,fsid=0 '*:/export' &&
rpc.nfsd --no-nfs-version 3 --lease-time 10 --grace-time 10 2 &&
rpc.mountd --no-nfs-version 3 &&
echo ready && exec sleep infinity
"""
"""In one mount namespace, which `ip netns exec` makes: /proc/fs/nfsd is of the network namespace that mounts it."""
_WRITE: Final = f"""
import os
with open("{_MOUNT}/checkpoint", "wb", buffering=0) as file:
    for part in range({CHECKPOINT_BYTES >> 20}):
        file.write(os.urandom(1 << 20))
    os.fsync(file.fileno())
"""
_READ: Final = f"""
with open("{_MOUNT}/checkpoint", "rb", buffering=0) as file:
    while file.read(1 << 20):
        pass
"""


def main() -> None:
    print(json.dumps(observe()))


def observe() -> dict[str, Any]:
    """What the file system says it moved, what the rail counted, and what the agent says of it."""
    with ExitStack() as stack:
        stack.enter_context(exported())
        agent = stack.enter_context(AgentProcess("--rail.devices", RAIL, command=AGENT))
        agent.until(lambda: bool(_ledger(agent, "by_origin")), _MOST_SECONDS)
        run("mount", "-t", "nfs4", "-o", "vers=4.2,proto=tcp,nconnect=2", f"{SERVER}:/", str(_MOUNT))
        stack.callback(run, "umount", str(_MOUNT))
        port = _port()
        subprocess.run([sys.executable, "-c", _WRITE], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("1")
        subprocess.run([sys.executable, "-c", _READ], check=True)
        moved = {direction: count - port[direction] for direction, count in _port().items()}

        def settled() -> bool:
            found = _ledger(agent, "by_origin")
            return all(sum(found[direction].values()) >= count for direction, count in moved.items())

        settled_in_time = agent.comes_true(settled, _MOST_SECONDS)
        return {
            "moved": moved,
            "operations": _operations(),
            "by_owner": _ledger(agent, "by_owner"),
            "by_origin": _ledger(agent, "by_origin"),
            "error_ratio": {
                labels["direction"]: value
                for labels, value in agent.samples("railscope_rail_ledger_error_ratio", device=RAIL)
            },
            "settled": settled_in_time,
            "sockets": subprocess.run(["ss", "-tnpi"], capture_output=True, text=True).stdout,
        }


@contextmanager
def exported() -> Iterator[None]:
    """Have a server with an export at the other end of a rail."""
    run("modprobe", "-a", "veth", "nfs", "nfsd")
    with ExitStack() as stack:
        run("ip", "netns", "add", _NAMESPACE)
        stack.callback(run, "ip", "netns", "del", _NAMESPACE)
        run("ip", "link", "add", RAIL, "type", "veth", "peer", "name", RAIL, "netns", _NAMESPACE)
        stack.callback(run, "ip", "link", "del", RAIL)
        run("ip", "address", "add", f"{CLIENT}/24", "dev", RAIL)
        run("ip", "link", "set", RAIL, "up")
        inside = ("ip", "-n", _NAMESPACE)
        run(*inside, "address", "add", f"{SERVER}/24", "dev", RAIL)
        for device in ("lo", RAIL):
            run(*inside, "link", "set", device, "up")
        Path("/export").mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", "/export")
        stack.callback(run, "umount", "/export")
        serving = stack.enter_context(
            subprocess.Popen(
                ["ip", "netns", "exec", _NAMESPACE, "sh", "-c", _SERVE],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        stack.callback(serving.kill)
        assert serving.stdout is not None
        said = []
        for line in serving.stdout:
            said.append(line)
            if line == "ready\n":
                break
        else:
            raise RuntimeError(f"the server does not start: {''.join(said)}")
        yield


def _port() -> dict[str, int]:
    folder = Path("/sys/class/net", RAIL, "statistics")
    return {way: int((folder / name).read_text()) for way, name in (("transmit", "tx_bytes"), ("receive", "rx_bytes"))}


def _ledger(agent: AgentProcess, which: str) -> dict[str, dict[str, float]]:
    """By direction, the rail's bytes by owner or origin."""
    found: dict[str, dict[str, float]] = {}
    for labels, value in agent.samples(f"railscope_rail_bytes_{which}_total", device=RAIL):
        found.setdefault(labels["direction"], {})[labels[which.removeprefix("by_")]] = value
    return found


def _operations() -> dict[str, dict[str, int]]:
    """Of the mount by operation: how often, and bytes sent and received, with RPC's headers (nfs's mountstats)."""
    found: dict[str, dict[str, int]] = {}
    mine = False
    for line in Path("/proc/self/mountstats").read_text().splitlines():
        if line.startswith("device "):
            mine = f" mounted on {_MOUNT} " in line
        name, _, rest = line.strip().partition(": ")
        numbers = rest.split()
        if mine and name.isupper() and len(numbers) >= 5 and int(numbers[0]):
            found[name] = {"operations": int(numbers[0]), "sent": int(numbers[3]), "received": int(numbers[4])}
    return found


if __name__ == "__main__":
    main()
