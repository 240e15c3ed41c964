"""The attach cookies lead the kernel to the arguments, and the probe points of a library are the right ones.

Cookies are decoded with the shifts of the BPF programs' own header; positions are compared with the testbed's
declarations of NCCL's functions.
"""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.libraries.communication import MARKERS, CommunicationLibrary, libraries_in
from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64, Elf
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions import entry_points as functions
from railscope.probes.nccl.functions.entry_points import (
    COLLECTIVE_FUNCTIONS,
    END_FUNCTIONS,
    FOLLOWED_FUNCTIONS,
    INIT_FUNCTIONS,
    CollectiveFunction,
    EndFunction,
    FollowedFunction,
    InitFunction,
)
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points
from tests.nccl.library import REPOSITORY
from tests.unit.elf_writer import WantedElf, WantedSymbol, write_elf

HEADER = (REPOSITORY / "probes/bpf/nccl.h").read_text()
SHIFTS = {name: int(value) for name, value in re.findall(r"#define PLACE_(\w+) (\d+)", HEADER)}
DECLARATIONS = (REPOSITORY / "testbed/workload/nccl_abi.h").read_text()
REGISTERS = {EM_X86_64: 6, EM_AARCH64: 8}

machines = st.sampled_from((EM_X86_64, EM_AARCH64))
libraries = st.integers(0, 0xFFFF)


def place(cookie: int, name: str) -> int:
    return cookie >> SHIFTS[name] & 0xF


def position(cookie: int, name: str, machine: int) -> int | None:
    """Position of an argument as the kernel will find it."""
    found = place(cookie, name)
    if found == SHIFTS["NONE"]:
        return None
    return found if found < SHIFTS["STACK"] else REGISTERS[machine] + found - SHIFTS["STACK"]


@given(st.sampled_from(COLLECTIVE_FUNCTIONS), machines, libraries, st.integers(0, 0xFFFF))
def test_a_collectives_cookie_names_its_arguments(
    function: CollectiveFunction, machine: int, library: int, stack_bytes: int
) -> None:
    cookie = functions.collective_cookie(function, machine, library, stack_bytes)
    assert 0 <= cookie < 1 << 64
    assert cookie & 0xFF == function.op
    assert position(cookie, "COMM", machine) == function.comm
    assert position(cookie, "COUNT", machine) == function.count
    assert position(cookie, "DATA_TYPE", machine) == function.data_type
    assert position(cookie, "PEER", machine) == function.peer
    assert position(cookie, "STREAM", machine) == function.stream
    assert cookie >> 28 & 0xF == 0  # no struct ncclInfo
    assert (cookie >> 32 & 0xFFFF, cookie >> 48) == (library, stack_bytes)


@given(st.sampled_from(INIT_FUNCTIONS), machines, libraries)
def test_an_init_functions_cookie_names_its_arguments(function: InitFunction, machine: int, library: int) -> None:
    cookie = functions.init_cookie(function, machine, library)
    by_value = function.id_by_value and machine == EM_X86_64
    assert cookie & 0xFF == function.kind
    assert position(cookie, "NEW_COMM", machine) == function.new_comm
    assert position(cookie, "RANKS", machine) == function.nranks
    assert position(cookie, "PARENT", machine) == function.parent
    if by_value:
        # System V ABI: 128 bytes by value lie on the stack and use no register
        assert place(cookie, "UNIQUE_ID") == SHIFTS["STACK"]
        assert position(cookie, "RANK", machine) == 2
    else:
        assert position(cookie, "UNIQUE_ID", machine) == function.unique_id
        assert position(cookie, "RANK", machine) == function.rank
    assert (cookie >> 28 & 0xF, cookie >> 32) == (int(by_value), library)


@given(st.sampled_from(END_FUNCTIONS), machines, libraries)
def test_an_end_functions_cookie_names_its_kind(function: EndFunction, machine: int, library: int) -> None:
    cookie = functions.end_cookie(function, machine, library)
    assert (cookie & 0xFF, position(cookie, "PARENT", machine), cookie >> 32) == (function.kind, 0, library)


@given(st.sampled_from(FOLLOWED_FUNCTIONS), machines, libraries)
def test_a_followed_functions_cookie_names_its_communicator(
    function: FollowedFunction, machine: int, library: int
) -> None:
    cookie = functions.followed_cookie(function, machine, library)
    assert (cookie & 0xFF, cookie >> 32) == (function.kind, library)
    assert position(cookie, "PARENT", machine) == function.comm


@given(libraries)
def test_the_cookie_of_the_common_entry_says_so(library: int) -> None:
    cookie = functions.enqueue_check_cookie(library)
    assert (cookie >> 28 & 1, cookie >> 32) == (1, library)


def declared(symbol: str) -> list[str] | None:
    """Names of a function's parameters."""
    found = re.search(rf"NCCL_FUNCTION\(ncclResult_t, {symbol}, ([^)]*)\)", DECLARATIONS)
    return [re.split(r"[ *]", parameter.strip())[-1] for parameter in found[1].split(",")] if found else None


def test_the_positions_are_those_of_the_declarations() -> None:
    checked = 0
    for function in COLLECTIVE_FUNCTIONS:
        names = declared(function.symbol)
        if names is None:
            continue
        checked += 1
        assert names.index("comm") == function.comm
        assert names.index("stream") == function.stream
        assert names.index("type") == function.data_type
        assert [at for at, name in enumerate(names) if name.endswith("count")] == [function.count]
        assert next((at for at, name in enumerate(names) if name in ("root", "peer")), None) == function.peer
    assert checked == 10
    for init in INIT_FUNCTIONS:
        names = declared(init.symbol)
        if names is None:
            continue
        checked += 1
        assert names[init.new_comm] in ("comm", "comms", "child")
        assert init.parent is None or names[init.parent] == "comm"
        assert init.nranks is None or names[init.nranks] in ("nranks", "device_count")
        assert init.rank is None or names[init.rank] == "rank"
        assert init.unique_id is None or names[init.unique_id] in ("id", "ids")
    assert checked == 15
    for end in END_FUNCTIONS:
        assert declared(end.symbol) in (["comm"], None)


def test_what_a_function_does_to_communicators_is_what_its_name_says() -> None:
    for end in END_FUNCTIONS:
        assert end.symbol == f"ncclComm{end.kind.name.title()}"
    named = {function.symbol.removeprefix("ncclComm"): function.kind.name for function in INIT_FUNCTIONS}
    ranks = dict.fromkeys(("InitRank", "InitRankConfig", "InitRankScalable"), "INIT")
    assert named == {**ranks, "InitAll": "INIT_ALL", "Split": "SPLIT", "Shrink": "SHRINK", "Grow": "GROW"}


def test_bcast_is_left_out_because_it_calls_broadcast() -> None:
    assert not any("ncclBcast" in symbol for symbol in functions.SYMBOLS)


PUSH = bytes.fromhex("55 48 89 e5 c3").ljust(16, b"\x90")
MOVED_STACK = bytes.fromhex("48 83 ec 28 55 c3").ljust(16, b"\x90")
CHANGED_ARGUMENT = bytes.fromhex("48 89 f7 55 c3").ljust(16, b"\x90")


def points_in(wanted: WantedElf, library: int = 2) -> tuple[ProbePoints, int]:
    """Probe points of a synthesised library, and where its code starts."""
    written = write_elf(wanted)
    fd = os.memfd_create("library")
    try:
        os.write(fd, written.data)
        with Elf.open(fd) as elf:
            named = any(symbol.name == MARKERS[CommunicationLibrary.NCCL] for symbol in wanted.exported)
            assert (CommunicationLibrary.NCCL in libraries_in(elf)) == named
            return probe_points(elf, library), written.code_at
    finally:
        os.close(fd)


def exported(*names: str) -> list[WantedSymbol]:
    return [WantedSymbol(name, offset=16 * number) for number, name in enumerate(names)]


def test_one_probe_at_the_common_entry_replaces_those_at_the_exported_functions() -> None:
    internal = [WantedSymbol(functions.ENQUEUE_CHECK, offset=48)]
    wanted = WantedElf(exported("ncclAllReduce", "ncclSend", "ncclCommDestroy"), internal, code=PUSH * 4)
    points, code_at = points_in(wanted)
    assert points.through_enqueue_check
    (point,) = points.calls
    assert (point.symbol, point.file_offset) == (functions.ENQUEUE_CHECK, code_at + 48)
    assert point.cookie == functions.enqueue_check_cookie(2)
    assert [(end.symbol, end.file_offset) for end in points.ends] == [("ncclCommDestroy", code_at + 32)]


@pytest.mark.parametrize("name", FOLLOWED_FUNCTIONS[0].symbols)
def test_what_connects_ranks_is_followed_under_the_name_that_it_has(name: str) -> None:
    wanted = WantedElf(exported("ncclAllReduce"), [WantedSymbol(name, offset=16)], code=PUSH * 2)
    points, code_at = points_in(wanted)
    assert [(one.symbol, one.file_offset) for one in points.followed] == [(name, code_at + 16)]
    assert points.followed[0].cookie >> 32 == 2


def test_without_the_common_entry_every_exported_function_is_probed() -> None:
    points, code_at = points_in(WantedElf(exported("ncclAllReduce", "ncclReduce", "ncclCommInitAll"), code=PUSH * 3))
    assert not points.through_enqueue_check
    assert [(point.symbol, point.file_offset - code_at) for point in points.calls] == [
        ("ncclAllReduce", 0),
        ("ncclReduce", 16),
    ]
    assert [point.symbol for point in points.inits] == ["ncclCommInitAll"]
    assert (points.calls_entry_only, points.refused) == ((), ())


def test_the_common_entry_that_cannot_be_probed_fast_gives_way_to_the_exported_functions() -> None:
    internal = [WantedSymbol(functions.ENQUEUE_CHECK, offset=16)]
    points, _ = points_in(WantedElf(exported("ncclAllReduce"), internal, code=PUSH + CHANGED_ARGUMENT))
    assert not points.through_enqueue_check
    assert [point.symbol for point in points.calls] == ["ncclAllReduce"]
    assert points.refused == ()


def test_prologues_decide_what_is_probed_where() -> None:
    code = PUSH + MOVED_STACK + CHANGED_ARGUMENT
    points, code_at = points_in(WantedElf(exported("ncclAllReduce", "ncclReduce", "ncclSend"), code=code))
    assert [point.symbol for point in points.calls] == ["ncclAllReduce"]
    (moved,) = points.calls_entry_only
    assert (moved.symbol, moved.file_offset) == ("ncclReduce", code_at + 16 + 4)
    assert moved.cookie >> 48 == 0x28
    assert points.refused == ("ncclSend",)


def test_two_names_of_one_function_are_one_probe() -> None:
    both = [WantedSymbol("ncclAllReduce"), WantedSymbol("ncclAlltoAll", 16), WantedSymbol("ncclAllToAll", 16)]
    points, code_at = points_in(WantedElf(both, code=PUSH * 2))
    assert [point.file_offset - code_at for point in points.calls] == [0, 16]
    assert [point.cookie & 0xFF for point in points.calls] == [Op.AllReduce, Op.AllToAll]


def test_arm64_functions_are_probed_where_they_start() -> None:
    points, code_at = points_in(WantedElf(exported("ncclAllReduce", "ncclSend"), code=bytes(32), machine=EM_AARCH64))
    assert [point.file_offset - code_at for point in points.calls] == [0, 16]
    assert points.refused == ()


@pytest.mark.parametrize("machine", [40, 243])
def test_a_library_for_another_machine_is_not_taken(machine: int) -> None:
    fd = os.memfd_create("library")
    try:
        os.write(fd, write_elf(WantedElf(exported("ncclAllReduce"), machine=machine)).data)
        with Elf.open(fd) as elf:
            assert not libraries_in(elf)
    finally:
        os.close(fd)
