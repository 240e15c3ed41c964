"""How long one full collection of a large host takes: 12 network cards, read as RDMA and as Ethernet, and 8 GPUs.

A collection is everything that is due within 5 s, one after the other: every counter source of every sampler and
watch, and which devices and ports there are.  Then the facts that a scrape shows are put together.  The agent spreads
this over several threads and periods; here nothing overlaps.  Twice a minute it also learns anew which NVLinks a GPU
has, what they count and who is at their other ends, and reads the GPUs' condition, PCIe links and their errors; once a
minute network modules and what error correction did.  The collections of a minute have all of it among them, and the
dearest of each minute is a line of its own.  All of it at once, as after a start, is another, with its parts.

What is read is simulated: RDMA and PCIe from files in a folder, NVLink and GPUs from a library that plays NVML
(tests/nvml/stub.c), modules from answers kept in memory, so that what firmware, modules and driver take to answer is
not in it.  Ethernet are links of a namespace host, without connections.

What other work on the machine adds to the time it does not add to the processor's, which stands beside it.

`python -m tests.bench.collection_cost FOLDER NAMESPACE ROUNDS` prints the times of every round as JSON; its
environment must lead to the simulated NVML.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from railscope.agent.node.condition.modules import Modules
from railscope.agent.node.condition.watch import ConditionWatch, Hardware
from railscope.agent.node.nvlink.gpu import Gpu, GpuHistories
from railscope.agent.node.rails.ethernet import EthernetWatch
from railscope.agent.node.rails.netdev_facts import rail_facts
from railscope.agent.node.rails.rdma_ports import RdmaWatch
from railscope.agent.node.rails.selection import decide_rails
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.ethtool_netlink import FecStatistics
from railscope.probes.netdev.sources import open_namespace
from railscope.probes.nvlink.gpu_events import GpuEvents
from railscope.probes.nvlink.nvml import NvmlSession
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.testbed.hosts import Fabric
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.sampler_cost import namespace_of
from tests.bench.target import BenchError, Built
from tests.nccl.library import REPOSITORY
from tests.nvml.stub import UNSIGNED_LONG_LONG, build_stub, link_lines
from tests.trees.pci import GPU_CLASS, INFINIBAND_CLASS, MELLANOX, SimulatedMachine
from tests.trees.rdma import MLX5_COUNTERS, MLX5_HW_COUNTERS, RdmaTree

PART: Final = "collection"
GPUS, LINKS_OF_A_GPU, CARDS = 8, 18, 12
_SYSFS, _PROCFS = Path("/sys"), Path("/proc")
_WARM_UP: Final = 2
_PERIODS_NS: Final = 5_000_000_000
_IN_A_MINUTE: Final = 12
_LEARNING_NS: Final = 61_000_000_000
"""After so long nothing at all is fresh any more."""
_PAUSE_SECONDS: Final = 0.05
_MODULES_NS: Final = 60_000_000_000
_LIFETIME_NS: Final = 60_000_000_000
_COUNTERS: Final = "netdev"
_RDMA, _ETHERNET, _NVLINK = "RDMA", "Ethernet", "NVLink"
_PCIE, _MODULES = "PCIe and the kernel's log", "modules"
_PROCESSOR: Final = "processor time"

_GPU_FIELDS: Final = (3, 4, 5, 6, 94, *range(142, 146), *range(173, 184), 197, 198, 230)
_LINK_FIELDS: Final = (*range(206, 216), 219, 220, 221, 222, *range(235, 251))
"""What GPUs and links tell of their condition: probes/nvlink."""
_MOVING_FIELDS: Final = (138, 139, 140, 141, 235)
"""Bytes, and blocks in which nothing was mended: what counts on while links work."""
_AER: Final = {
    "correctable": ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF"),
    "nonfatal": ("Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt", "UnxCmplt", "RxOF", "MalfTLP",
                 "ECRC", "UnsupReq", "ACSViol", "UncorrIntErr", "BlockedTLP", "AtomicOpBlocked", "TLPBlockedErr",
                 "PoisonTLPBlocked"),
}  # fmt: skip
_AER["fatal"] = _AER["nonfatal"]

Milliseconds = Mapping[str, float]
"""One collection, by what was read, and the processor's time for all of it."""


class JumpingClock(SystemClock):
    """The machine's clock, set ahead so that everything is due again."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.ahead_ns


def measure(_built: Built, rounds: int) -> list[Line]:
    """Collect `rounds` times in a fresh process.

    Raises:
        BenchError: the process fails; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory, Fabric(hosts=1, rails=8) as fabric:
        folder = Path(directory)
        _simulate_rdma(folder / "sysfs")
        _simulate_pci(folder / "sysfs")
        _simulate_gpus(folder)
        _add_links(fabric)
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "NVML_STUB_SCRIPT": str(folder / "script"),
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.collection_cost", directory, fabric.hosts[0].namespace, str(rounds)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=REPOSITORY,
        )
    if done.returncode:
        raise BenchError(f"the collection fails: {done.stderr.strip()[-500:]}")
    return lines_of(*json.loads(done.stdout))


def lines_of(usual: Sequence[Milliseconds], learning: Sequence[Milliseconds]) -> list[Line]:
    """The table's lines; the whole is summed up collection by collection."""
    what = f"RDMA, Ethernet and NVLink of {GPUS} GPUs and {CARDS} NICs (simulated)"
    seldom = "the same with all that is read once or twice a minute"
    most = Limit(Bound.AT_MOST, 20)
    wholes = [_whole(each) for each in usual]
    dearest = [max(wholes[at : at + _IN_A_MINUTE]) for at in range(0, len(wholes), _IN_A_MINUTE)]
    return [
        figure(PART, what, "ms", wholes, target=most),
        figure(PART, "the dearest of each minute", "ms", dearest, target=most),
        *(figure(PART, f"of it {name}", "ms", [each[name] for each in usual]) for name in usual[0]),
        figure(PART, seldom, "ms", [_whole(each) for each in learning], target=most),
        *(figure(PART, f"of that {name}", "ms", [each[name] for each in learning]) for name in learning[0]),
    ]


def _whole(each: Milliseconds) -> float:
    return sum(value for name, value in each.items() if name != _PROCESSOR)


def _simulate_rdma(sysfs: Path) -> None:
    tree = RdmaTree(sysfs)
    for card in range(CARDS):
        device = tree.device(f"mlx5_{card}", pci=f"0000:{0x10 + 8 * card:02x}:00.0", numa_node=card * 2 // CARDS)
        tree.port(device, counters=MLX5_COUNTERS, hw_counters=MLX5_HW_COUNTERS, netdevs=(f"rail{card}",))


def _simulate_pci(sysfs: Path) -> None:
    """Each card and GPU below a port of its own; both ends of each link count its errors."""
    machine = SimulatedMachine(sysfs)
    for name, address in _functions():
        bus = int(address[5:7], 16)
        code = GPU_CLASS if name.startswith("gpu") else INFINIBAND_CLASS
        function = machine.function(f"pci0001:00/0001:00:{bus % 32:02x}.{bus // 32}/{address}", code, MELLANOX)
        for end in (function, function.parent):
            (end / "max_link_width").write_text("16\n")
            (end / "max_link_speed").write_text("32.0 GT/s PCIe\n")
            for severity, errors in _AER.items():
                lines = [f"{error} 0" for error in errors]
                (end / f"aer_dev_{severity}").write_text("\n".join([*lines, f"TOTAL_ERR_{severity.upper()} 0", ""]))


def _functions() -> list[tuple[str, str]]:
    """(name, PCI address) of cards and GPUs."""
    names = [*(f"mlx5_{card}" for card in range(CARDS)), *(f"gpu{gpu}" for gpu in range(GPUS))]
    return [(name, f"0001:{number + 1:02x}:00.0") for number, name in enumerate(names)]


class _Modules:
    """Answers at once: an optical module of eight lanes in each port, whose error correction has 16 bins."""

    def __init__(self) -> None:
        memory, lanes = bytearray(128), bytearray(128)
        memory[0] = 0x19
        memory[14], memory[16] = 50, 0x81
        for at in (154, 186):
            lanes[at - 128 : at - 128 + 16] = b"\x27\x10" * 8
        self._pages = {0: bytes(memory), 0x11: bytes(lanes)}
        self._fec = FecStatistics(10**12, 0, 10**15, tuple((one, one, 10**12) for one in range(16)))

    def fec_statistics(self, device: str) -> FecStatistics:
        del device
        return self._fec

    def module_page(self, device: str, page: int, offset: int, length: int, bank: int = 0) -> bytes:
        del device, offset, length, bank
        return self._pages[page]

    def close(self) -> None:
        """Nothing is open."""


def _simulate_gpus(folder: Path) -> None:
    """Everything that a GPU of the newest generation tells of itself and of its links."""
    build_stub(folder)
    lines = [f"gpus {GPUS}"]
    for gpu in range(GPUS):
        lines += [*link_lines(gpu, range(LINKS_OF_A_GPU)), f"fabric {gpu} 3 0", f"events {gpu} {0xFFFF}"]
        told = [(field, 0) for field in _GPU_FIELDS]
        told += [(field, link) for link in range(LINKS_OF_A_GPU) for field in _LINK_FIELDS]
        lines += [f"field {gpu} {field} {scope} 0 {UNSIGNED_LONG_LONG} 0" for field, scope in told]
        lines += [f"grow {gpu} {field} {link} 100000" for link in range(LINKS_OF_A_GPU) for field in _MOVING_FIELDS]
    (folder / "script").write_text("\n".join([*lines, ""]))


def _add_links(fabric: Fabric) -> None:
    """A fabric has at most eight rails: let the host have as many links as it has cards.

    Raises:
        BenchError: the kernel refuses.
    """
    host = fabric.hosts[0]
    lines = []
    for card in range(len(host.rails), CARDS):
        lines.append(f"link add card{card} type veth peer name rail{card} netns {host.namespace}")
        lines.append(f"link set card{card} up")
    done = subprocess.run(
        ["ip", "-n", fabric.switch, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    for card in range(len(host.rails), CARDS):
        if done.returncode == 0:
            done = subprocess.run(
                ["ip", "-n", host.namespace, "link", "set", f"rail{card}", "up"], capture_output=True, text=True
            )
    if done.returncode:
        raise BenchError(f"links cannot be made: {done.stderr.strip()}")


class CollectedHost:
    """Everything that the agent reads of one host, one thing after the other."""

    def __init__(self, folder: Path, namespace: NetworkNamespace, stack: ExitStack) -> None:
        clock = self._clock = JumpingClock()
        self._sampler, self._ethernet_sampler, self._rdma_sampler = (Sampler(clock) for _ in range(3))
        for sampler in (self._sampler, self._ethernet_sampler, self._rdma_sampler):
            stack.callback(sampler.stop)
        self._sources = open_namespace(namespace, procfs=_PROCFS, sysfs=_SYSFS, clock=clock)
        stack.callback(self._sources.close)
        self._sampler.add(_COUNTERS, namespace.inode, self._sources.counters)
        self._ethernet = EthernetWatch(clock, self._ethernet_sampler, procfs=_PROCFS, lifetime_ns=_LIFETIME_NS)
        stack.callback(self._ethernet.close)
        self._ethernet.add_process(os.getpid(), namespace)
        self._rdma = RdmaWatch(
            clock, self._rdma_sampler, sysfs=folder / "sysfs", bytes_period_seconds=0.1, netlink=False
        )
        stack.callback(self._rdma.close)
        session = NvmlSession.open()
        stack.callback(session.close)
        histories = GpuHistories()
        self._events = GpuEvents(session, range(GPUS), clock)
        self._condition = ConditionWatch(
            clock, sysfs=folder / "sysfs", log_device=Path("/dev/null"), modules=Modules(clock, _MODULES_NS, _Modules)
        )
        self._condition.set_hardware(
            Hardware(tuple(_functions()), tuple((str(card), f"rail{card}") for card in range(CARDS)))
        )
        stack.callback(self._condition.close)
        self._gpus = [
            Gpu(index, session, clock, sysfs=folder / "sysfs", histories=histories)
            for index in range(session.gpu_count())
        ]

    def collect(self, later_ns: int) -> Milliseconds:
        """Read everything that is due so much later."""
        self._clock.ahead_ns += later_ns
        works = {
            _RDMA: self._read_rdma,
            _ETHERNET: self._read_ethernet,
            _NVLINK: self._read_gpus,
            _PCIE: self._read_pcie,
            _MODULES: self._condition.update_modules,
        }
        before_ns = time.process_time_ns()
        taken = {name: _milliseconds(work) for name, work in works.items()}
        return taken | {_PROCESSOR: (time.process_time_ns() - before_ns) / 1e6}

    def _read_rdma(self) -> None:
        self._rdma.update()
        self._rdma_sampler.read_due(self._clock.monotonic_ns())
        facts = self._rdma.facts()
        _expect("RDMA ports", len([port for port in facts if port.transmit_bytes is not None]), CARDS)

    def _read_ethernet(self) -> None:
        decisions = decide_rails(self._sources.inventory.read())
        self._sampler.read_due(self._clock.monotonic_ns())
        self._ethernet.update(decisions)
        self._ethernet_sampler.read_due(self._clock.monotonic_ns())
        state = self._sampler.state()
        ethernet = {fact.device: fact for fact in self._ethernet.facts()}
        rails = [
            rail_facts(
                decision,
                state.device(decision.device.netns, decision.device.name),
                netns_label="",
                ethernet=ethernet.get(decision.device.name),
            )
            for decision in decisions
            if decision.rail is not None
        ]
        _expect("rails", len([rail for rail in rails if rail.queue is not None and rail.tcp is not None]), CARDS)

    def _read_gpus(self) -> None:
        for gpu in self._gpus:
            gpu.read()
        _expect("events", len(self._events.read()), 0)
        _expect("GPUs that tell of their condition", sum(gpu.gpu.recovery_action == "none" for gpu in self._gpus), GPUS)
        _expect("NVLinks", sum(len(gpu.links) for gpu in self._gpus), GPUS * LINKS_OF_A_GPU)

    def _read_pcie(self) -> None:
        self._condition.update()
        facts = self._condition.facts()
        _expect("PCIe links", sum(bool(one.lanes and one.errors) for one in facts.pcie), CARDS + GPUS)


def _milliseconds(work: Callable[[], None]) -> float:
    began_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began_ns) / 1e6


def _expect(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise BenchError(f"{found} {what} were read, not {expected}")


def collect(folder: Path, namespace: NetworkNamespace, rounds: int) -> tuple[list[Milliseconds], list[Milliseconds]]:
    """Collect so many minutes as usual, each after a collection of everything.

    Raises:
        BenchError: not everything was read.
    """
    usual, learning = [], []
    with ExitStack() as stack:
        host = CollectedHost(folder, namespace, stack)
        for _ in range(_WARM_UP):
            host.collect(_LEARNING_NS)
        gc.collect()  # as the agent does after its start
        gc.freeze()
        for _ in range(rounds):
            time.sleep(_PAUSE_SECONDS)
            learning.append(host.collect(_LEARNING_NS))
            for _ in range(_IN_A_MINUTE):
                time.sleep(_PAUSE_SECONDS)
                usual.append(host.collect(_PERIODS_NS))
    return usual, learning


def main(arguments: list[str]) -> int:
    folder, name, rounds = arguments
    try:
        print(json.dumps(collect(Path(folder), namespace_of(name), int(rounds))))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
