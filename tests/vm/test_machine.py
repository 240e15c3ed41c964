"""What a virtual machine's outcome is made of, with a script in the emulator's place; and the kernel to boot."""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import pytest

from tests.vm import machine
from tests.vm.machine import MachineMissing, boot
from tests.vm.vmlinux import vmlinux

KERNEL = "6.1.0"
_FIND_PORTS = """#!/bin/sh
for word; do
    case $word in file:*) [ -z "$console" ] && console=${word#file:} || result=${word#file:};; esac
done
"""


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test puts its script, which finds the serial ports' files in $console and $result."""
    (tmp_path / KERNEL).mkdir()
    (tmp_path / KERNEL / "vmlinux").touch()
    monkeypatch.setattr(machine, "KERNELS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "qemu-system-x86_64"


def write(emulator: Path, script: str) -> None:
    emulator.write_text(_FIND_PORTS + script)
    emulator.chmod(0o755)


def test_status_and_result_come_through(emulator: Path, tmp_path: Path) -> None:
    write(emulator, r"""printf '[ 1.0] a message\nRC=3\r\n[ 2.0] reboot\n' >"$console"; echo '{}' >"$result" """)
    outcome = boot(KERNEL, "false", tmp_path, seconds=60)
    assert (outcome.status, outcome.result) == (3, "{}\n")


def test_a_machine_that_says_no_status_has_none_whatever_the_emulators(emulator: Path, tmp_path: Path) -> None:
    write(emulator, r"""printf 'Kernel panic\n' >"$console" """)
    outcome = boot(KERNEL, "true", tmp_path, seconds=60)
    assert (outcome.status, outcome.console) == (None, "Kernel panic\n")


def test_a_machine_that_hangs_is_ended(emulator: Path, tmp_path: Path) -> None:
    write(emulator, "exec sleep 600")
    outcome = boot(KERNEL, "true", tmp_path, seconds=1)
    assert outcome.status is None
    assert "not finished after 1 s" in outcome.console


def test_without_a_machine_one_line_says_what_to_do(emulator: Path, tmp_path: Path) -> None:
    write(emulator, "")
    with pytest.raises(MachineMissing, match="make test-vm"):
        boot("9.9", "true", tmp_path, seconds=60)


def bzimage(payload: bytes, size: int) -> bytes:
    """A kernel image with one setup sector; simulated."""
    setup = bytearray(1024)
    setup[0x1F1] = 1
    setup[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", setup, 0x248, 16, len(payload) + 4)
    return bytes(setup) + bytes(16) + payload + struct.pack("<I", size) + b"behind it"


def test_the_kernel_is_taken_out_of_its_image() -> None:
    kernel = b"\x7fELF" + bytes(5000)
    assert vmlinux(bzimage(lzma.compress(kernel), len(kernel))) == kernel


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (bytes(2048), "no bzImage"),
        (bzimage(b"BZh9 unknown", 100), "unknown way"),
        (bzimage(lzma.compress(b"\x7fELF cut"), 5000), "8 of 5000 bytes"),
        (bzimage(lzma.compress(b"text"), 4), "no ELF file"),
    ],
)
def test_what_is_no_kernel_is_refused(image: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        vmlinux(image)
