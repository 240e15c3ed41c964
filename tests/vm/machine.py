"""A virtual machine for one command: another kernel, this checkout, nothing of this machine's state.

tests/vm/make-image makes what is booted.  The processor is emulated, so that any machine will do: twelve seconds from
start to the command, and Python runs about ten times slower than outside.  The checkout and the packages beside this
Python are shared read-only, as /checkout and /packages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
KERNELS: Final = REPOSITORY / ".venv" / "vm" / "kernels"
MEMORY_MEBIBYTES: Final = 1536
RESULT_PORT: Final = "/dev/ttyS1"
"""Where the command writes its result: the kernel's messages go to the first serial port, the console."""


class MachineMissing(RuntimeError):
    """There is nothing to boot, or nothing to boot it with; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of a machine."""

    status: int | None
    """Exit status of the command; None: the machine did not come to its end."""
    console: str
    result: str
    """What was written to `RESULT_PORT`."""


def boot(kernel: str, command: str, folder: Path, *, seconds: int) -> Outcome:
    """Run `command` in /checkout on a kernel (`6.1.0`, `6.12.117`: a folder of `KERNELS`); `folder` is for its output.

    Raises:
        MachineMissing: see there.
    """
    emulator = shutil.which("qemu-system-x86_64")
    if emulator is None or not (KERNELS / kernel / "vmlinux").exists():
        raise MachineMissing("there is no virtual machine: run 'make test-vm' as root")
    console, result = folder / "console", folder / "result"
    run = command.replace(" ", "%20")
    options = ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MEBIBYTES)]
    options += ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    options += ["-serial", f"file:{console}", "-serial", f"file:{result}"]
    options += ["-kernel", str(KERNELS / kernel / "vmlinux"), "-initrd", str(KERNELS / kernel / "initrd")]
    # An emulator that waits for its processor misses the ticks that the kernel checks its timer by, and panics.
    options += ["-append", f"console=ttyS0 quiet panic=-1 mitigations=off no_timer_check run={run}"]
    for tag, shared in (("checkout", REPOSITORY), ("packages", Path(sysconfig.get_path("platlib")))):
        path = str(shared).replace(",", ",,")  # the emulator's way to write a comma
        options += ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none,readonly=on,multidevs=remap"]
    with subprocess.Popen(
        ["nice", emulator, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            said += f"not finished after {seconds} s"
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in (console, result)]
    # The kernel may say its last words before the line has ended.
    status = re.search(r"^RC=(\d+)(?:\r?$|\[)", texts[0], re.MULTILINE)
    return Outcome(int(status[1]) if status else None, texts[0] + said, texts[1])
