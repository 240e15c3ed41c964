"""The probe goes where the kernel emulates the instruction and every argument is still in its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64
from railscope.probes.nccl.functions.prologue import PROLOGUE_BYTES, ProbeOffset, probe_offset

ENDBR64 = "f3 0f 1e fa"
PUSH_RBP, PUSH_R15 = "55", "41 57"
NOP5 = "0f 1f 44 00 00"
SUB_RSP_24 = "48 83 ec 18"
SUB_RSP_280 = "48 81 ec 18 01 00 00"
MOVABS_RAX = "48 b8 ef be fe ca a3 5a 00 00"
MOV_RBP_RSP = "48 89 e5"
TEST_RDI = "48 85 ff"
MOV_R15_RDI = "49 89 ff"
MOVSLQ_R9_ESI = "4c 63 ce"
MOV_RDI, MOV_RSI, MOV_RDX = "48 8b 7e 28", "48 8b 77 28", "48 8b 56 28"
PXOR_XMM0 = "66 0f ef c0"


def offset_in(*instructions: str, machine: int = EM_X86_64) -> ProbeOffset | None:
    return probe_offset(bytes.fromhex("".join(instructions)), machine)


@pytest.mark.parametrize("first", [PUSH_RBP, PUSH_R15, "53", "41 54", NOP5, "90"])
def test_an_emulated_first_instruction_is_probed_where_it_is(first: str) -> None:
    assert offset_in(first, MOV_RBP_RSP) == ProbeOffset(0, 0)


@pytest.mark.parametrize("second", [PUSH_RBP, PUSH_R15, NOP5])
def test_a_landing_pad_is_skipped(second: str) -> None:
    assert offset_in(ENDBR64, second) == ProbeOffset(4, 0)


@pytest.mark.parametrize(
    ("instructions", "skip_bytes", "stack_bytes"),
    [
        ([MOVABS_RAX, PUSH_RBP], 10, 0),  # the real ncclCommInitAll
        ([MOV_R15_RDI, PUSH_RBP], 3, 0),
        ([PXOR_XMM0, PUSH_RBP], 4, 0),
        ([SUB_RSP_24, PUSH_RBP], 4, 24),
        ([SUB_RSP_280, PUSH_R15], 7, 280),
        ([ENDBR64, SUB_RSP_24, PUSH_RBP], 8, 24),
        ([SUB_RSP_24, SUB_RSP_280, NOP5], 11, 304),
    ],
)
def test_instructions_that_keep_the_arguments_are_passed(
    instructions: list[str], skip_bytes: int, stack_bytes: int
) -> None:
    found = offset_in(*instructions)
    assert found == ProbeOffset(skip_bytes, stack_bytes)
    assert found is not None
    assert found.return_possible == (stack_bytes == 0)


def test_a_register_that_holds_no_argument_may_change() -> None:
    """The real ncclIbMultiSend of 2.29.2, which has two arguments, begins by writing the sixth's register."""
    code = bytes.fromhex("".join((MOVSLQ_R9_ESI, PUSH_R15)))
    assert probe_offset(code, EM_X86_64) is None
    assert probe_offset(code, EM_X86_64, arguments=2) == ProbeOffset(3, 0)
    for writes, arguments in ((MOV_RDI, 1), (MOV_RSI, 2), (MOV_RDX, 3), (MOVSLQ_R9_ESI, 6)):
        code = bytes.fromhex("".join((writes, PUSH_R15)))
        assert probe_offset(code, EM_X86_64, arguments=arguments) is None
        assert probe_offset(code, EM_X86_64, arguments=arguments - 1) is not None


@pytest.mark.parametrize(
    "instruction",
    [
        "48 89 f7",  # mov rdi, rsi
        "31 f6",  # xor esi, esi
        "b9 01 00 00 00",  # mov ecx, 1
        "4d 89 c8",  # mov r8, r9
        "41 89 d1",  # mov r9d, edx
        "40 b6 01",  # mov sil, 1
        "66 ba 01 00",  # mov dx, 1
        "b5 01",  # mov ch, 1
        "41 b0 01",  # mov r8b, 1
        "48 87 fe",  # xchg rsi, rdi
    ],
)
def test_a_changed_argument_register_refuses_the_probe(instruction: str) -> None:
    assert offset_in(instruction, PUSH_RBP) is None
    assert offset_in(ENDBR64, instruction, PUSH_RBP) is None


@pytest.mark.parametrize(
    "instruction",
    [
        "e8 00 00 00 00",  # call
        "c3",  # ret
        "ff e0",  # jmp rax
        "48 83 e4 f0",  # and rsp, -16
        "48 89 c4",  # mov rsp, rax
        "48 29 c4",  # sub rsp, rax
        "6a 00",  # push 0
        "ff 75 00",  # push [rbp]
    ],
)
def test_what_leaves_or_moves_the_stack_unknowably_refuses_the_probe(instruction: str) -> None:
    assert offset_in(TEST_RDI, instruction, PUSH_RBP) is None


@pytest.mark.parametrize("jump", ["75 10", "0f 84 10 00 00 00", "eb 10", "e9 10 00 00 00"])
def test_a_jump_is_emulated_and_so_probed_itself(jump: str) -> None:
    # branch_setup_xol_ops; ncclProfilerStopProxyOpEvent has no other instruction that every call passes
    assert offset_in("48 8b 05 11 22 33 44", "48 85 c0", jump) == ProbeOffset(10, 0)


def test_a_push_with_a_prefix_that_changes_nothing_is_single_stepped_by_the_kernel() -> None:
    # push_setup_xol_ops takes 0x41 only
    assert offset_in("40 55", PUSH_RBP) is None


def test_the_search_ends_soon() -> None:
    assert offset_in(*[TEST_RDI] * 8, PUSH_RBP) == ProbeOffset(24, 0)
    assert offset_in(*[TEST_RDI] * 9, PUSH_RBP) is None


@pytest.mark.parametrize("code", ["", "48", "48 83 ec", "f3 0f 1e", ENDBR64, SUB_RSP_24, MOVABS_RAX[:12]])
def test_code_that_ends_too_early_is_not_probed(code: str) -> None:
    assert offset_in(code) is None


@pytest.mark.parametrize("code", ["", "ff 43 00 d1", "fd 7b be a9"])
def test_on_arm64_the_first_instruction_is_probed(code: str) -> None:
    assert offset_in(code, machine=EM_AARCH64) == ProbeOffset(0, 0)


@given(st.binary(max_size=PROLOGUE_BYTES))
def test_any_bytes_give_an_offset_inside_them_or_none(code: bytes) -> None:
    found = probe_offset(code, EM_X86_64)
    if found is not None:
        assert 0 <= found.skip_bytes < len(code)


@given(st.lists(st.sampled_from((SUB_RSP_24, SUB_RSP_280, TEST_RDI, MOVABS_RAX, ENDBR64)), max_size=5))
def test_the_stack_moves_by_the_sum_of_what_is_subtracted(before: list[str]) -> None:
    found = offset_in(*before, PUSH_RBP)
    assert found is not None
    assert found.skip_bytes == len(bytes.fromhex("".join(before)))
    assert found.stack_bytes == 24 * before.count(SUB_RSP_24) + 280 * before.count(SUB_RSP_280)
