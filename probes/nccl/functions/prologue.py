"""Chooses the instruction of a function at which a probe is attached.

The kernel replaces the probed instruction by a breakpoint and then either emulates it (push, nop, jump) or single-steps
it out of line; single-stepping takes about 17 times as long (bench).  A function that starts with an instruction of the
second kind is probed a little later, at the next one the kernel emulates, as long as nothing skipped changes an
argument register.  A return probe is only possible where the stack pointer has not moved yet, because it replaces the
return address there.  Source: arch/x86/kernel/uprobes.c, Linux 6.18.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Final

from railscope.probes.libraries.elf import EM_X86_64

_ENDBR64: Final = bytes.fromhex("f30f1efa")
_NOP5: Final = bytes.fromhex("0f1f440000")
_HARMLESS: Final = (
    (_ENDBR64, 4),
    (bytes.fromhex("488b05"), 7),  # mov disp32(%rip),%rax
    (bytes.fromhex("4885c0"), 3),  # test %rax,%rax
    (bytes.fromhex("48833d"), 8),  # cmpq $imm8,disp32(%rip)
)
"""Opcodes with the length of the instruction: what functions that first look at a global variable begin with."""
_MOST_INSTRUCTIONS: Final = 8
_ARGUMENT_REGISTERS: Final = (
    ("rdi", "edi", "di", "dil"),
    ("rsi", "esi", "si", "sil"),
    ("rdx", "edx", "dx", "dl", "dh"),
    ("rcx", "ecx", "cx", "cl", "ch"),
    ("r8", "r8d", "r8w", "r8b"),
    ("r9", "r9d", "r9w", "r9b"),
)
"""Names of what holds the first six arguments, in their order, whole or in part."""
REGISTER_ARGUMENTS: Final = len(_ARGUMENT_REGISTERS)

PROLOGUE_BYTES: Final = 64
"""How much of a function must be read to decide."""


@dataclass(frozen=True, slots=True)
class ProbeOffset:
    """Where to put the breakpoint, relative to the function's start."""

    skip_bytes: int
    stack_bytes: int
    """How far the stack pointer has moved there."""

    @property
    def return_possible(self) -> bool:
        return self.stack_bytes == 0


def probe_offset(code: bytes, machine: int, arguments: int = REGISTER_ARGUMENTS) -> ProbeOffset | None:
    """Choose the instruction for a probe on a hot function; None when all near ones would be single-stepped.

    `code` is the function's first `PROLOGUE_BYTES` (fewer at the end of a section).  The registers of the first
    `arguments` arguments hold them still where the probe goes; a function of two may use the others at once.
    """
    if machine != EM_X86_64 or _emulated(code):
        return ProbeOffset(0, 0)
    skipped = _skip_harmless(code)
    if _emulated(code[skipped:]):
        return ProbeOffset(skipped, 0)
    return _walk(code, frozenset(chain.from_iterable(_ARGUMENT_REGISTERS[:arguments])))


def _skip_harmless(code: bytes) -> int:
    """Bytes of leading instructions of the commonest kinds, which change neither arguments nor stack pointer."""
    at = 0
    while length := next((size for opcode, size in _HARMLESS if code.startswith(opcode, at)), 0):
        at += length
    return at


def _emulated(code: bytes) -> bool:
    """Whether the kernel emulates the instruction at the start of `code`: push of a register, a nop, or a jump."""
    if not code:
        return False
    if 0x50 <= code[0] <= 0x57 or code.startswith(_NOP5) or code[0] == 0x90:
        return True
    if 0x70 <= code[0] <= 0x7F or code[0] in (0xE9, 0xEB):
        return True
    if len(code) < 2:
        return False
    return (code[0] == 0x41 and 0x50 <= code[1] <= 0x57) or (code[0] == 0x0F and 0x80 <= code[1] <= 0x8F)


def _walk(code: bytes, kept: frozenset[str]) -> ProbeOffset | None:
    """Step over instructions that leave the `kept` registers alone until one is emulated."""
    import capstone  # 20 ms and 10 MB that only unusual prologues cost

    disassembler = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    disassembler.detail = True
    stack_bytes = 0
    for number, instruction in enumerate(disassembler.disasm(code, 0)):
        if _emulated(code[instruction.address :]):
            return ProbeOffset(instruction.address, stack_bytes)
        if number >= _MOST_INSTRUCTIONS or instruction.group(capstone.CS_GRP_JUMP):
            return None
        if instruction.group(capstone.CS_GRP_CALL) or instruction.group(capstone.CS_GRP_RET):
            return None
        written = {instruction.reg_name(register) for register in instruction.regs_access()[1]}
        if written & kept:
            return None
        if "rsp" in written:
            if instruction.mnemonic != "sub" or instruction.operands[1].type != capstone.x86.X86_OP_IMM:
                return None
            stack_bytes += int(instruction.operands[1].imm)
    return None
