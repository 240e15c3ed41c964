"""Measuring the trap on this kernel: it is really hit, only by us, and nothing stays behind."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path
from typing import Final

import capstone
import pytest

from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64
from railscope.probes.loading import calibration
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.calibration import (
    CODE,
    DEFAULT_TRAP_NS,
    LOOP_OFFSET,
    Calibration,
    CalibrationError,
    Source,
    calibrate,
)
from railscope.probes.loading.links import AttachKind, Links
from railscope.probes.nccl.functions.prologue import probe_offset

_DISASSEMBLERS: Final = {
    "x86_64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
    "aarch64": (capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM),
}


def lines(machine: str, start: int) -> list[str]:
    disassembler = capstone.Cs(*_DISASSEMBLERS[machine])
    return [f"{i.address} {i.mnemonic} {i.op_str}".strip() for i in disassembler.disasm(CODE[machine][start:], start)]


@pytest.mark.root
@pytest.mark.parametrize("attach", AttachKind)
def test_the_trap_of_each_kind_of_probe_is_measured(attach: AttachKind) -> None:
    found = calibrate(attach)
    assert found == Calibration(found.trap_ns, Source.MEASURED)
    assert found.trap_ns > 0


@pytest.mark.root
def test_nothing_of_the_measurement_stays_behind() -> None:
    calibrate(AttachKind.MULTI)
    before = len(list(Path("/proc/self/fd").iterdir()))
    calibrate(AttachKind.MULTI)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "railscope-calibration" not in Path("/proc/self/maps").read_text()


@pytest.mark.root
def test_a_probe_that_is_not_hit_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "attach", lambda *_, **__: None)
    with pytest.raises(CalibrationError, match="cannot be"):
        calibration.measure_trap_ns(AttachKind.MULTI)


def _refuse(*_: object, **__: object) -> None:
    raise KernelRefusal(1, "attach to 1 functions: Operation not permitted")


@pytest.mark.root
def test_where_nothing_may_be_attached_the_cost_is_assumed_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "attach", _refuse)
    assert calibrate(AttachKind.MULTI) == Calibration(
        DEFAULT_TRAP_NS, Source.ASSUMED, "attach to 1 functions: Operation not permitted"
    )


def test_where_no_code_may_be_mapped_the_cost_is_assumed_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mmap, "mmap", forbidden)
    found = calibrate(AttachKind.MULTI)
    assert found == Calibration(DEFAULT_TRAP_NS, Source.ASSUMED, "code cannot be mapped: Operation not permitted")


def test_an_unknown_machine_is_assumed_to_trap_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    found = calibrate(AttachKind.MULTI)
    assert found.source is Source.ASSUMED
    assert "riscv64" in found.reason


@pytest.mark.parametrize(("machine", "number"), [("x86_64", EM_X86_64), ("aarch64", EM_AARCH64)])
def test_the_probed_function_begins_with_an_instruction_that_the_kernel_emulates(machine: str, number: int) -> None:
    where = probe_offset(CODE[machine], number)
    assert where is not None
    assert where.skip_bytes == 0


def test_the_machine_code_says_what_it_should() -> None:
    assert lines("x86_64", 0)[:3] == ["0 push rbp", "1 pop rbp", "2 ret"]
    assert lines("x86_64", LOOP_OFFSET) == [
        "16 push rbx",
        "17 mov rbx, rdi",
        "20 call 0",
        "25 dec rbx",
        "28 jne 0x14",
        "30 pop rbx",
        "31 ret",
    ]
    assert lines("aarch64", 0)[:3] == ["0 stp x29, x30, [sp, #-0x10]!", "4 ldp x29, x30, [sp], #0x10", "8 ret"]
    assert lines("aarch64", LOOP_OFFSET) == [
        "16 stp x29, x30, [sp, #-0x20]!",
        "20 str x19, [sp, #0x10]",
        "24 mov x19, x0",
        "28 bl #0",
        "32 subs x19, x19, #1",
        "36 b.ne #0x1c",
        "40 ldr x19, [sp, #0x10]",
        "44 ldp x29, x30, [sp], #0x20",
        "48 ret",
    ]
