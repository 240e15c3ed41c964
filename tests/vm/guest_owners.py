"""Inside a virtual machine: jobs beside each other on soft-RoCE devices, and whose their queue pairs are found to be.

    python3 -m tests.vm.guest_owners

The real NCCL and ib_send_bw (perftest) have queue pairs on the devices of one rail, the real UCX on those of another
one alone.  The agent is the one that is shipped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.node.fabric.queue_pairs import QueuePairs, ask_kernel
from railscope.probes.clock import SystemClock
from railscope.testbed.hosts import Host
from railscope.testbed.nccl.build import built
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job
from tests.vm.soft_roce import GID_INDEX, SYSFS, Pair, made

SHARED: Final = Pair(("rxe0", "rxe1"), ("eth0", "eth1"), subnet=0)
OWN: Final = Pair(("rxe2", "rxe3"), ("eth2", "eth3"), subnet=1)
"""The first device is UCX's alone, for both ends; the other one is nobody's."""
AGENT: Final = (sys.executable, "-m", "railscope.agent.cli.main")
"""Without the script that a virtual environment has: its first line names another machine's folder."""
_SHOWN: Final = (
    *("railscope_rail_info", "railscope_rail_transmit_bytes_total", "railscope_rail_bytes_by_owner_total"),
    *("railscope_rail_bytes_by_origin_total", "railscope_rail_ledger_error_ratio", "railscope_rdma_queue_pairs"),
)
_MOST_SECONDS: Final = 240
_NCCL: Final[Mapping[str, str | None]] = {
    "NCCL_IB_DISABLE": None,
    "NCCL_NET": "IB",
    "NCCL_IB_GID_INDEX": GID_INDEX,
    "NCCL_IB_TIMEOUT": "20",  # a processor that is emulated answers late
    "NCCL_NET_GDR_LEVEL": "LOC",
}


class Rank(Host):
    """A rank that uses its own end of the shared rail."""

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs `arguments` as this rank; the process keeps its pid."""
        return ["env", f"NCCL_IB_HCA=={SHARED.devices[self.index]}", *arguments]


@dataclass(frozen=True, slots=True)
class Ranks:
    """In a fabric's place."""

    hosts: Sequence[Host] = tuple(Rank(index, "", ("lo",), ("127.0.0.1",)) for index in range(2))


def main() -> None:
    with made([SHARED, OWN]):
        print(json.dumps(observe()))


def observe() -> dict[str, Any]:
    """Who runs, and what the agent says of it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = stack.enter_context(
            Job(
                Ranks(),
                folder,
                built(),
                pattern="allreduce",
                iterations=20,
                size_bytes=1 << 16,
                hold=True,
                environment=_NCCL,
            )
        )
        ranks = job.ready(timeout_s=300)
        job.start()
        job.finished(timeout_s=300)  # and its connections stay
        before = sent_packets()
        pids = {
            "nccl": list(ranks),
            "rdma_other": stack.enter_context(_ends(_send_bw, SHARED)),
            "ucx": stack.enter_context(_ends(_ucx, OWN)),
        }
        agent = stack.enter_context(
            # Reading NCCL's symbols for more than calls takes minutes on a processor that is emulated.
            AgentProcess(*("--rail.devices", "rxe*", "--level", "counts"), command=AGENT, ready_seconds=_MOST_SECONDS)
        )
        everyone = {pid for some in pids.values() for pid in some}
        page: dict[str, Any] = {}

        def all_known() -> bool:
            try:
                page.update(json.loads(agent.page("/queue-pairs")))
            except TimeoutError:
                return False  # it attaches, which takes long on an emulated processor
            mine = [one for one in page["queue_pairs"] if one["pid"] in everyone]
            looked_at = all(one["owners"] not in (None, ["unknown"]) for one in mine)
            return looked_at and {one["pid"] for one in mine} == everyone

        known = agent.comes_true(all_known, _MOST_SECONDS)
        shown = {name: agent.samples(name) for name in _SHOWN}
        packets = {device: count - before[device] for device, count in sent_packets().items()}
        job.release()
        job.wait(timeout_s=300)
    return {
        "pids": pids,
        "known": known,
        "queue_pairs": page.get("queue_pairs"),
        "shown": shown,
        "sent_packets": packets,
        **_try_to_bind(),
    }


def _try_to_bind() -> dict[str, Any]:
    """What comes of it to count single queue pairs of a device: one that there is, and all that a process makes."""
    device = SHARED.devices[0]
    link = ("link", f"{device}/1")
    watch = QueuePairs(SystemClock(), ask_kernel(Path("/proc")))
    with _ends(_send_bw, SHARED) as pids:
        number = next(one.number for one in watch.read().queue_pairs if one.device == device and one.pid in pids)
        one = subprocess.run(["rdma", "statistic", "qp", "bind", *link, "lqpn", str(number)], capture_output=True)
        bound = [*watch.read().bound]
    every = subprocess.run(["rdma", "statistic", "qp", "set", *link, "auto", "pid", "on"], capture_output=True)
    with _ends(_send_bw, SHARED):
        bound += watch.read().bound
    return {
        "one_allowed": one.returncode == 0,
        "every_allowed": every.returncode == 0,
        "why": (one.stderr + every.stderr).decode(),
        "bound": [list(found.queue_pairs) for found in bound],
    }


@contextmanager
def _ends(start: Callable[[ExitStack, Pair], tuple[list[str], list[str]]], pair: Pair) -> Iterator[list[int]]:
    """The two processes of a traffic, once packets flow; their pids.

    They stand still then, as they poll, and two emulated processors have others to run; their queue pairs stay.
    """
    with ExitStack() as stack:
        server, client = start(stack, pair)
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        output = stack.enter_context(log.open("wb"))

        def begin(command: list[str]) -> subprocess.Popen[bytes]:
            running = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output))
            stack.callback(running.kill)
            return running

        device = pair.devices[0]
        before, listening = sent_packets()[device], begin(server)
        talking = begin(client)
        deadline = time.monotonic() + _MOST_SECONDS
        while sent_packets()[device] < before + _FLOWING_PACKETS:
            if time.monotonic() > deadline or listening.poll() is not None:
                raise RuntimeError(f"{client}: no packets: {log.read_text(errors='replace')}")
            if talking.poll() is not None:
                talking = begin(client)  # the server did not listen yet
            time.sleep(0.2)
        for one in (listening, talking):
            one.send_signal(signal.SIGSTOP)
        yield [listening.pid, talking.pid]


_FLOWING_PACKETS: Final = 100


def _send_bw(stack: ExitStack, pair: Pair) -> tuple[list[str], list[str]]:
    del stack
    command = ["ib_send_bw", "-x", GID_INDEX, "-F", "-D", "600", "-s", "4096", "-u", "22", "-p", "18600"]
    return [*command, "-d", pair.devices[1]], [*command, "-d", pair.devices[0], "127.0.0.1"]


def _ucx(stack: ExitStack, pair: Pair) -> tuple[list[str], list[str]]:
    del stack
    # At UCX's lower level, which connects by itself: the upper one does it over UD, which does not come through here.
    command = ["env", f"UCX_IB_GID_INDEX={GID_INDEX}", "ucx_perftest", "-p", "13400", "-x", "rc_verbs", "-t", "am_bw"]
    # Both ends take the client's device.
    command += ["-D", "bcopy", "-s", "4096", "-n", "100000000", "-d", f"{pair.devices[0]}:1"]
    return command, [*command, "127.0.0.1"]


def sent_packets() -> dict[str, int]:
    """By device, what the kernel has counted since it was made."""
    folder = SYSFS / "class/infiniband"
    return {
        device: int((folder / device / "ports/1/hw_counters/sent_pkts").read_text())
        for pair in (SHARED, OWN)
        for device in pair.devices
    }


if __name__ == "__main__":
    main()
