"""A machine whose hardware falls ill on demand, and the real agent on it (all of the hardware is simulated).

The agent is a process of its own in a mount namespace where /sys is a made tree, /dev/kmsg a pipe that a test writes
records into, and the driver's library plays NVML (tests/nvml/stub.c).  What it reads twice a minute it reads each
second here, as rules are quickened too: `python -m tests.stack.ill_machine agent …` is that agent.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from railscope.agent.cli.main import main
from railscope.agent.node.condition import watch as condition
from railscope.agent.node.daemon import hardware
from railscope.agent.node.nvlink import gpu as nvlink_gpu
from railscope.agent.node.rails import rdma_machine
from railscope.probes.nvlink import links
from tests.fabric.agent_process import AgentProcess
from tests.nvml.stub import UNSIGNED_INT, UNSIGNED_LONG_LONG, build_stub, link_lines
from tests.trees.rdma import DGX_H100_RAILS, mlx5_roce_8rails, write

GPUS, LINKS = 8, 4
_SECOND_NS: Final = 1_000_000_000
_MOUNT: Final = 'mount --bind "$1" /sys && mount --bind "$2" /dev/kmsg && shift 2 && exec "$@"'
_LANES: Final = 16
_LONGEST: Final = 64
"""Characters of a file of sysfs, here."""
_AER: Final = "RxErr 0\nBadTLP {}\nTOTAL_ERR_COR {}\n"
CRC, RECOVERY, REPLAYS, UNCORRECTED, ACTION = 163, 162, 94, 4, 230


class IllMachine:
    """Eight GPUs and eight rails; every method changes what the agent reads next."""

    def __init__(self, folder: Path) -> None:
        """All is sound."""
        self._sysfs = folder / "sys"
        self._log = folder / "kmsg"
        self._script = folder / "script"
        self._rdma = mlx5_roce_8rails(self._sysfs)
        devices = self._sysfs / "bus/pci/devices"
        for bus in DGX_H100_RAILS:
            address = f"0000:{bus}:00.0"
            (devices / address).symlink_to(self._rdma.function(address, "mlx5_core", 0))
            self.pcie(address, lanes=_LANES, errors=0)
            for name, text in (("max_link_width", str(_LANES)), ("current_link_speed", "32.0 GT/s PCIe")):
                write(devices / address / name, text)
        os.mkfifo(self._log)
        self._sequence = 0
        self._told: dict[str, str] = {}
        lines = [f"gpus {GPUS}"]
        for gpu in range(GPUS):
            lines += [*link_lines(gpu, range(LINKS)), f"events {gpu} {0xFFFF}"]
        self._base = lines
        for gpu in range(GPUS):
            self.nvml(f"fabric {gpu}", "3 0")
            self.nvml(f"clocks {gpu}", "0")
            self.field(gpu, UNCORRECTED, 0)
            self.field(gpu, REPLAYS, 0, UNSIGNED_INT)
            self.field(gpu, ACTION, 0, UNSIGNED_INT)
        build_stub(folder)

    @contextmanager
    def agent(self, log: Path) -> Iterator[AgentProcess]:
        """The agent on it, ready."""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self._script.parent), "NVML_STUB_SCRIPT": str(self._script)}
        space = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "sh")
        with AgentProcess(
            # Jobs are no matter here, and no other agent of this machine is in the way.
            *("--no-collector.collective", "--no-collector.netdev", "--pid", str(os.getpid())),
            prefix=(*space, str(self._sysfs), str(self._log)),
            command=(sys.executable, "-m", "tests.stack.ill_machine"),
            environment=environment,
            log=log,
        ) as agent:
            yield agent

    def port(self, device: str, *, physical_state: str = "5: LinkUp", rate: str = "400 Gb/sec (4X NDR)") -> None:
        """The link of a port is so."""
        for file, text in (("phys_state", physical_state), ("rate", rate)):
            _set(self._rdma.counter(f"{device}/1", file), text)

    def counter(self, device: str, name: str, value: int) -> None:
        """A counter of a port stands at this."""
        _set(self._rdma.counter(f"{device}/1", name), str(value))

    def pcie(self, address: str, *, lanes: int, errors: int) -> None:
        """The PCIe link of a function has so many lanes, and so many bad packets came since the boot."""
        folder = self._sysfs / "bus/pci/devices" / address
        _set(folder / "current_link_width", str(lanes))
        _set(folder / "aer_dev_correctable", _AER.format(errors, errors))

    def nvml(self, what: str, value: str) -> None:
        """A line of the script of NVML's stand-in, in which `value` replaces the one before."""
        self._told[what] = value
        self._write_script([f"{name} {told}" for name, told in self._told.items()])

    def field(self, gpu: int, field: int, value: int, kind: int = UNSIGNED_LONG_LONG, link: int = 0) -> None:
        """A field value of NVML is this."""
        self.nvml(f"field {gpu} {field} {link} 0 {kind}", str(value))

    def event(self, gpu: int, types: int, data: int) -> None:
        """NVML tells of an event, once."""
        told = [f"{name} {told}" for name, told in self._told.items()]
        self._write_script([*told, f"event {gpu} {types} {data}"])

    def kernel_says(self, text: str) -> None:
        """A line in the kernel's log."""
        self._sequence += 1
        descriptor = os.open(self._log, os.O_WRONLY | os.O_NONBLOCK)
        try:
            # One write is one record, as of the device.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_WRONLY | os.O_NONBLOCK | os.O_DIRECT)
            os.write(descriptor, f"3,{self._sequence},{time.monotonic_ns() // 1000},-;{text}\n".encode())
        finally:
            os.close(descriptor)

    def _write_script(self, lines: list[str]) -> None:
        new = self._script.with_suffix(".new")
        new.write_text("\n".join([*self._base, *lines, ""]))
        new.replace(self._script)


def _set(file: Path, text: str) -> None:
    """Change a file at once: whoever reads it meanwhile, from a kept descriptor, sees the old text or the new one."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, text.encode().ljust(_LONGEST, b"\n"), 0)
        os.ftruncate(descriptor, _LONGEST)
    finally:
        os.close(descriptor)


def quicken() -> None:
    """Read each second what is read seldom."""
    hardware._NVLINK_PERIOD_SECONDS = 1.0  # type: ignore[misc]
    condition._PCIE_NS = nvlink_gpu._HEALTH_NS = links._LEARN_NS = _SECOND_NS  # type: ignore[misc]
    rdma_machine._PERIOD_NS = _SECOND_NS  # type: ignore[misc]


if __name__ == "__main__":
    quicken()
    sys.exit(main(sys.argv[1:]))
