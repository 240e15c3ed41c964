"""Transfers of other libraries in the kernel's tables: counted with their bytes, and there from begin to end.

The libraries are a few instructions each, loaded by a process that makes the calls that a test tells it to; what they
return is one of their arguments.  The real ones are in tests/transfers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.transfers.watch import TransferWatch
from railscope.probes.clock import SystemClock
from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import NOBODY, SHARED_TABLES
from railscope.probes.processes.processes import PROCFS, executable_mappings, identity_of
from railscope.probes.transfers.functions import OPERATIONS, transfer_points, ucx_status_distance
from railscope.probes.transfers.programs import TransferPrograms
from railscope.probes.transfers.records import MOST_SPARE, TRANSFER_TOTAL, TransferStat
from tests.root.caller import Caller
from tests.root.cuda_job import MODES, SESSION
from tests.root.probe_targets import GARBAGE, assemble, on_x86_64
from tests.waiting import eventually

pytestmark = [pytest.mark.root, on_x86_64]

GREEDY, MODEST = 5000, 5001
DISTANCE = 0x104
"""From a request back to its status."""
IN_USE, DATA_TYPE, CALLBACK = 1, 8, 2
POST = "_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs"
STATUS = "_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH"
SUBMIT = "_ZN8mooncake14TransferEngine14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE"
FREE = "_ZN8mooncake14TransferEngine11freeBatchIDEm"
GLOO_SEND = "_ZN4gloo9transport3tcp13UnboundBuffer4sendEimmm"
GLOO_REDUCE = "_ZN4gloo9allreduceERKNS_16AllreduceOptionsE"
RELEASE = "_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH"


def returning(register: str, before: str = "") -> str:
    return f"push %rbp; pop %rbp; {before} mov {register},%rax; ret"


FUNCTIONS = {
    "ucp_init_version": returning("%rdi"),
    # Of its arguments the fourth, which as the remote address is free here.
    "ucp_put_nbx": returning("%rcx"),
    "ucp_get_nbx": returning("%rcx"),
    # The second, its number.
    "ucp_am_send_nbx": returning("%rsi"),
    "ucp_tag_recv_nbx": returning("%rcx"),
    "ucp_request_free": returning("%rdi"),
    "ucp_request_check_status": f"testb $1,{4 - DISTANCE}(%rdi); jz 1f; mov {-DISTANCE}(%rdi),%eax; ret; "
    "1: mov $1,%eax; ret",
    # The third; it puts through UCX meanwhile, with its own arguments.
    POST: "push %rbp; push %rdx; mov %rcx,%rdi; mov $1,%edx; mov $0,%ecx; mov %r8,%r9; "
    "call ucp_put_nbx@PLT; pop %rax; pop %rbp; ret",
    STATUS: returning("%rdx"),
    RELEASE: returning("%rdx"),
    "MPI_Allreduce": "push %rbp; 1: pause; cmpq $0,(%rdi); je 1b; mov 8(%rdi),%rax; pop %rbp; ret",
    "MPI_Send": returning("%r9"),
    # The first argument is the request that they leave where the second points.
    "MPI_Ibarrier": "push %rbp; pop %rbp; mov %edi,(%rsi); xor %eax,%eax; ret",
    "MPI_Barrier_init": "push %rbp; pop %rbp; mov %edi,(%rdx); xor %eax,%eax; ret",
    "MPI_Start": returning("$0"),
    "MPI_Wait": returning("%rsi"),
    "MPI_Waitall": returning("%rdx"),
    "MPI_Waitany": returning("%rcx"),
    "MPI_Testsome": returning("$0"),
    "MPI_Test": returning("$0"),
    "MPI_Request_free": returning("$0"),
    "MPIR_Err_create_code": returning("%rdi"),
    "_ZN8mooncake14TransferEngine15allocateBatchIDEm": returning("%rdi"),
    SUBMIT: returning("%rdi"),
    FREE: returning("%rdi"),
    "_ZN4gloo9transport3tcp12CreateDeviceERKNS1_4attrE": returning("%rdi"),
    GLOO_SEND: returning("%rdi"),
    GLOO_REDUCE: returning("%rdi"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assemble(tmp_path_factory.mktemp("transfers"), **FUNCTIONS)


@dataclass(frozen=True, slots=True)
class Followed:
    nccl: NcclPrograms
    programs: TransferPrograms
    pid: int

    def totals(self) -> dict[str, dict[str, int]]:
        """By library and operation, the sums over its peers."""
        tables = self.programs.read()
        found: dict[str, dict[str, int]] = {}
        for key, total in zip(tables.keys, tables.totals, strict=True):
            if key["tgid"] != self.pid:
                continue
            operation = OPERATIONS[int(key["function"])]
            sums = found.setdefault(f"{operation.library.value} {operation.op}", {})
            for name in TRANSFER_TOTAL.names or ():
                sums[name] = sums.get(name, 0) + int(np.sum(total[name]))
        return found

    def under_way(self) -> int:
        tables = self.programs.read()
        return int((tables.request_keys["tgid"] == self.pid).sum())

    def inside(self) -> bool:
        tables = self.programs.read()
        return bool(((tables.threads["tgid"] == self.pid) & (tables.threads["start_ns"] > 0)).any())


@contextmanager
def followed(
    library: Path, caller: Caller, mode: tuple[AttachKind, EnqueueTime] = SESSION, *, most_entries: int = 4096
) -> Iterator[Followed]:
    with library.open("rb") as file, Elf.open(file.fileno()) as elf:
        points = transfer_points(elf)
    assert points is not None
    with ExitStack() as stack:
        nccl = NcclPrograms.load(ProgramSettings(attach=mode[0], enqueue_time=mode[1]))
        stack.callback(nccl.close)
        programs = TransferPrograms.load(nccl, most_entries=most_entries)
        stack.callback(programs.close)
        stack.callback(programs.attach(str(library), points).close)
        yield Followed(nccl, programs, caller.pid)


def store(caller: Caller, content: bytes) -> int:
    address = caller.memory(max(8, len(content)))
    for at in range(0, len(content), 8):
        caller.store(address + at, int.from_bytes(content[at : at + 8], "little"), 8)
    return address


def parameters(caller: Caller, attributes: int = 0, data_type: int = 0) -> int:
    """The leading fields of a ucp_request_param_t."""
    return store(caller, struct.pack("<IIQQQ", attributes, 0, 0, 0, data_type))


def request(caller: Caller, status: int = 0, flags: int = 1) -> int:
    """A request with its status and flags in front of it."""
    block = caller.memory(4096)
    caller.store(block + 1024 - DISTANCE, status, 4)
    caller.store(block + 1024 - DISTANCE + 4, flags, 4)
    return block + 1024


@pytest.mark.parametrize("mode", MODES)
def test_bytes_follow_from_count_and_datatype(library: Path, mode: tuple[AttachKind, EnqueueTime]) -> None:
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        plain, wide = parameters(caller), parameters(caller, DATA_TYPE, 8 << 3)
        several = parameters(caller, DATA_TYPE, 2)
        generic = parameters(caller, DATA_TYPE, 7)
        parts = store(caller, struct.pack("<6Q", 0, 100, 0, 20, 0, 3))
        caller.call("ucp_put_nbx", 3, 77, 0, 1000, 0, 0, plain)
        caller.call("ucp_get_nbx", 2, 77, 0, 1000, 0, 0, wide)
        caller.call("ucp_am_send_nbx", 1, 77, 0, 0, 0, parts, 3, several)
        caller.call("ucp_am_send_nbx", 1, 77, 0, 0, 0, parts, 4, plain)
        caller.call("ucp_put_nbx", 1, 77, 0, 5, 0, 0, generic)
        totals = seen.totals()
        stats = seen.programs.stats()
    assert (totals["ucx Put"]["operations"], totals["ucx Put"]["bytes"], totals["ucx Put"]["unsized"]) == (4, 3000, 1)
    assert (totals["ucx Get"]["operations"], totals["ucx Get"]["bytes"]) == (2, 16_000)
    assert (totals["ucx AmSend"]["operations"], totals["ucx AmSend"]["bytes"]) == (2, 127)
    assert [totals[op]["completed"] for op in ("ucx Put", "ucx Get", "ucx AmSend")] == [4, 2, 2]
    assert sum(totals[op]["buckets"] for op in totals) == 8
    assert (stats[TransferStat.ENTRIES], stats[TransferStat.RETURNS], stats[TransferStat.FULL]) == (8, 8, 0)


def test_what_is_sent_to_no_process_moves_nothing(library: Path) -> None:
    """A neighbour that the edge of a grid lacks: MPI_PROC_NULL is -1 in MPICH, -2 in Open MPI."""
    with Caller(library) as caller, followed(library, caller) as seen:
        caller.call("MPI_Send", 1, 0, 25, 0x4C000405, 7, 0, 0)
        for nobody in (-1, -2):
            caller.call("MPI_Send", 1, 0, 25, 0x4C000405, GARBAGE | nobody & 0xFFFFFFFF, 0, 0)
        sent = seen.totals()["mpi Send"]
    assert [sent[name] for name in ("operations", "completed", "bytes", "unsized")] == [3, 3, 100, 0]


def test_more_bytes_than_a_process_can_hold_are_not_believed(library: Path) -> None:
    with Caller(library) as caller, followed(library, caller) as seen:
        plain, wide = parameters(caller), parameters(caller, DATA_TYPE, (2**61 - 1) << 3)
        several = parameters(caller, DATA_TYPE, 2)
        parts = store(caller, struct.pack("<4Q", 0, 2**63, 0, 2**63 + 5))
        caller.call("ucp_put_nbx", 1, 77, 0, 2**63, 4096, 0, plain)
        assert seen.programs.read().requests["bytes"].tolist() == [0]
        caller.call("ucp_put_nbx", 1, 77, 0, 2**64 - 1, 0, 0, plain)
        caller.call("ucp_put_nbx", 1, 77, 0, 2**62, 0, 0, wide)
        caller.call("ucp_am_send_nbx", 1, 77, 0, 0, 0, parts, 2, several)
        caller.call("ucp_put_nbx", 1, 77, 0, 2**47, 0, 0, plain)
        caller.call("MPI_Send", 1, 0, -1, 0x4C00FF0B, 7, 0, 0)
        put, message, sent = (seen.totals()[op] for op in ("ucx Put", "ucx AmSend", "mpi Send"))
    assert (put["operations"], put["bytes"], put["unsized"]) == (4, 2**47, 3)
    assert (message["bytes"], message["unsized"]) == (0, 1)
    assert (sent["operations"], sent["bytes"], sent["unsized"]) == (1, 0, 1), "a count below 0"


@pytest.mark.parametrize("mode", MODES)
def test_a_request_is_under_way_until_it_is_freed(library: Path, mode: tuple[AttachKind, EnqueueTime]) -> None:
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        plain = parameters(caller)
        done, failed, early = request(caller), request(caller, -3), request(caller, 1, 0)
        for one in (done, failed, early):
            caller.call("ucp_put_nbx", 1, 77, 0, 1000, one, 0, plain)
        assert seen.under_way() == 3
        assert seen.totals()["ucx Put"]["completed"] == 0
        for one in (done, failed, early, done):
            caller.call("ucp_request_free", 1, one)
        tables = seen.programs.read()
        assert tables.requests["let_go"].tolist() == [DISTANCE], "freed before it is complete: UCX tells nobody"
        over = (caller.pid, early, int(tables.requests["start_ns"][0]))
        assert [seen.programs.end([over]) for _ in range(2)] == [{over}, set()], "counted once"
        assert seen.under_way() == 0
        total = seen.totals()["ucx Put"]
    assert [total[name] for name in ("operations", "completed", "failed", "lost")] == [3, 2, 1, 0]
    assert total["buckets"] == 1


def test_what_fails_at_once_what_lies_in_the_callers_memory_and_what_is_used_again(library: Path) -> None:
    with Caller(library) as caller, followed(library, caller) as seen:
        own, plain = parameters(caller, IN_USE), parameters(caller)
        caller.call("ucp_put_nbx", 1, 77, 0, 10, 2**64 - 3, 0, plain)  # UCS_ERR_IO_ERROR
        caller.call("ucp_put_nbx", 1, 77, 0, 10, 4096, 0, own)
        caller.call("ucp_put_nbx", 1, 77, 0, 10, 0, 0, own)
        total = seen.totals()["ucx Put"]
        assert [total[name] for name in ("completed", "failed", "lost")] == [2, 1, 1]
        assert seen.under_way() == 0
        caller.call("ucp_put_nbx", 2, 77, 0, 10, 8192, 0, plain)
        assert seen.under_way() == 1
        assert seen.totals()["ucx Put"]["lost"] == 2


@pytest.mark.parametrize("mode", MODES)
def test_what_one_library_does_through_another_counts_once(library: Path, mode: tuple[AttachKind, EnqueueTime]) -> None:
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        plain = parameters(caller)
        text = store(caller, b"decode-0".ljust(16, b"\0"))
        descriptors = store(caller, struct.pack("<20Q", *(word for size in range(1, 6) for word in (0, size, 0, 0))))
        handle = store(
            caller,
            struct.pack("<2Q", 0, 0)
            + struct.pack("<QIIQQQ", text, 0, 0, descriptors, descriptors + 5 * 32, descriptors + 5 * 32)
            + bytes(40)
            + struct.pack("<4Q", text, 8, 0, 0),
        )
        caller.call(POST, 1, 0, handle, 1, 77, plain)
        assert seen.under_way() == 1
        caller.call(STATUS, 3, 0, handle, 1)
        assert seen.under_way() == 1
        caller.call(STATUS, 1, 0, handle, 0)
        caller.call(STATUS, 1, 0, handle, 0)
        caller.call(POST, 1, 0, handle, 1, 77, plain)
        caller.call(RELEASE, 1, 0, handle, 0)
        totals = seen.totals()
        tables = seen.programs.read()
        (peer,) = {int(one["peer"]) for one in tables.keys if one["tgid"] == caller.pid}
        assert seen.programs.peer_name(caller.pid, peer) == "decode-0"
    assert list(totals) == ["nixl Transfer"]
    total = totals["nixl Transfer"]
    assert [total[name] for name in ("operations", "bytes", "completed", "failed", "lost")] == [2, 30, 1, 0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_mooncake_is_under_way_from_its_entry_until_it_is_freed(
    library: Path, mode: tuple[AttachKind, EnqueueTime]
) -> None:
    read, write, retries = 0, 1, 0

    def batch(caller: Caller, *requests: tuple[int, int], words: tuple[int, ...] = (retries,)) -> int:
        content = b"".join(
            struct.pack(f"<{5 + len(words)}Q", opcode, 4096, 1, 8192, length, *words) for opcode, length in requests
        )
        begin = store(caller, content)
        return store(caller, struct.pack("<3Q", begin, begin + len(content), begin + len(content)))

    with Caller(library) as caller, followed(library, caller, mode) as seen:
        caller.call(SUBMIT, 1, 0, 1, 700, batch(caller, (write, 100), (write, 20)))
        caller.call(SUBMIT, 1, 0, 1, 701, batch(caller, (read, 3)))
        caller.call(SUBMIT, 1, 0, 1, 702, batch(caller, (read, 3), (write, 4)))
        caller.call(SUBMIT, 1, 0, 1, 706, batch(caller, *[(read, 10)] * 1000))
        assert seen.under_way() == 4
        for number in (700, 701, 702, 706, 700):
            caller.call(FREE, 1, 0, 1, number)
        assert seen.under_way() == 0
        # Requests of another build, a length that no process can hold, a list that ends before it begins.
        caller.call(SUBMIT, 1, 0, 1, 703, batch(caller, *[(read, 9)] * 6, words=()))
        caller.call(SUBMIT, 1, 0, 1, 704, batch(caller, (write, 2**63)))
        caller.call(SUBMIT, 1, 0, 1, 705, store(caller, struct.pack("<3Q", 8192, 4096, 4096)))
        totals, stats = seen.totals(), seen.programs.stats()
    assert [totals["mooncake Write"][name] for name in ("operations", "bytes", "completed")] == [1, 120, 1]
    assert [totals["mooncake Read"][name] for name in ("operations", "bytes", "completed")] == [2, 10_003, 2]
    both = totals["mooncake Transfer"]
    assert [both[name] for name in ("operations", "bytes", "unsized", "completed")] == [4, 7, 3, 1]
    assert stats[TransferStat.RETURNS] == 0


@pytest.mark.parametrize("mode", MODES)
def test_what_gloo_sends_is_counted_at_entries_alone_as_it_may_throw(
    library: Path, mode: tuple[AttachKind, EnqueueTime]
) -> None:
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        caller.call(GLOO_REDUCE, 1, 4096)
        caller.call(GLOO_SEND, 2, 4096, 1, 7, 0, 1000)
        caller.call(GLOO_SEND, 1, 4096, 1, 7, 0, 2**64 - 1)
        totals, stats = seen.totals(), seen.programs.stats()
    assert [totals["gloo Send"][name] for name in ("operations", "bytes", "unsized", "lost")] == [3, 2000, 1, 3]
    assert totals["gloo AllReduce"]["operations"] == 1
    assert (stats[TransferStat.ENTRIES], stats[TransferStat.RETURNS]) == (4, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_blocking_call_is_there_from_its_entry_to_its_return(
    library: Path, mode: tuple[AttachKind, EnqueueTime]
) -> None:
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        address = caller.memory(4096)
        double, derived = 0x4C00080B, 0x8C000001
        caller.start("MPI_Allreduce", address, 0, GARBAGE | 100, double, 0, 0)
        eventually(seen.inside)
        assert seen.totals()["mpi AllReduce"]["completed"] == 0
        caller.store(address, 1, 8)
        caller.finish()
        assert not seen.inside()
        caller.call("MPI_Allreduce", 1, address, 0, 100, derived, 0, 0)
        caller.call("MPI_Send", 2, 0, 25, 0x4C000405, 7, 0, 0)
        caller.call("MPI_Send", 1, 0, 25, 0x4C000405, 7, 0, 5)
        totals = seen.totals()
    reduced, sent = totals["mpi AllReduce"], totals["mpi Send"]
    assert [reduced[name] for name in ("operations", "bytes", "unsized", "completed")] == [2, 800, 1, 2]
    assert [sent[name] for name in ("operations", "bytes", "completed", "failed")] == [3, 300, 3, 1]


MADE, BUILT_IN = 0xAC000000, 0x6C000001
"""Requests of MPICH: the first of those that calls make, and one that stands for all that is complete at once."""


def requests_of(caller: Caller, *requests: int) -> int:
    """An array of them."""
    return store(caller, struct.pack(f"<{len(requests) + len(requests) % 2}I", *requests, *[0] * (len(requests) % 2)))


@pytest.mark.parametrize("mode", MODES)
def test_requests_of_mpi_end_with_the_calls_that_wait_for_them_or_find_them_complete(
    library: Path, mode: tuple[AttachKind, EnqueueTime]
) -> None:
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        place, yes = caller.memory(8), store(caller, struct.pack("<Q", 1))
        for number in range(10):
            caller.call("MPI_Ibarrier", 1, MADE + number, place)
        caller.call("MPI_Ibarrier", 1, BUILT_IN, place)
        assert seen.under_way() == 10
        one = requests_of(caller, MADE)
        caller.call("MPI_Test", 1, one, store(caller, bytes(8)), 0)
        assert seen.under_way() == 10
        (asked,) = [one for one in seen.programs.read().requests if one["asked_ns"]]
        assert asked["asked_last_ns"] >= asked["asked_ns"] > asked["start_ns"]
        caller.call("MPI_Test", 1, one, yes, 0)
        caller.call("MPI_Wait", 1, requests_of(caller, MADE + 1), 0)
        caller.call("MPI_Wait", 1, requests_of(caller, MADE + 2), 15)  # it fails
        assert seen.under_way() == 7
        several = requests_of(caller, MADE + 3, 0x2C000000, MADE + 4, MADE + 5, MADE + 6)
        caller.call("MPI_Waitany", 1, 5, several, store(caller, struct.pack("<Q", 2)), 0)
        assert MADE + 4 not in seen.programs.read().request_keys["request"].tolist()
        caller.call("MPI_Testsome", 1, 5, several, store(caller, struct.pack("<Q", 2)), requests_of(caller, 4, 0))
        assert sorted(seen.programs.read().request_keys["request"].tolist()) == [MADE + 5, MADE + 7, MADE + 8, MADE + 9]
        caller.call("MPI_Request_free", 1, requests_of(caller, MADE + 5))
        caller.call("MPI_Waitall", 1, 2, requests_of(caller, MADE + 7, MADE + 8), 0)
        caller.call("MPI_Waitall", 1, 1, requests_of(caller, MADE + 9), 18)  # of which one failed
        totals = seen.totals()
        assert seen.under_way() == 0
    barrier = totals["mpi Barrier"]
    assert [barrier[name] for name in ("operations", "completed", "failed", "lost", "unsized")] == [11, 9, 1, 2, 0]
    assert [totals["mpi Wait"][name] for name in ("operations", "completed", "failed")] == [5, 5, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_wait_for_more_requests_than_are_noted_ends_them_all(
    library: Path, mode: tuple[AttachKind, EnqueueTime]
) -> None:
    many = 300
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        place = caller.memory(8)
        for number in range(many):
            caller.call("MPI_Ibarrier", 1, MADE + number, place)
        caller.call("MPI_Waitall", 1, many, requests_of(caller, *range(MADE, MADE + many)), 0)
        assert seen.under_way() == 0
        total = seen.totals()["mpi Barrier"]
    assert [total[name] for name in ("operations", "completed", "lost")] == [many, many, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_persistent_request_is_an_operation_each_time_it_is_started(
    library: Path, mode: tuple[AttachKind, EnqueueTime]
) -> None:
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        place, one, unknown = caller.memory(8), requests_of(caller, MADE), requests_of(caller, MADE + 1)
        caller.call("MPI_Barrier_init", 1, MADE, 0, place)
        assert seen.totals() == {}
        assert seen.programs.read().requests["start_ns"].tolist() == [0]
        for _ in range(3):
            caller.call("MPI_Start", 1, one)
            caller.call("MPI_Wait", 1, one, 0)
            caller.call("MPI_Wait", 1, one, 0)
        caller.call("MPI_Start", 2, one)  # the end of the first was not seen
        caller.call("MPI_Request_free", 1, one)
        # One that was prepared before anybody looked.
        caller.call("MPI_Start", 1, unknown)
        caller.call("MPI_Wait", 1, unknown, 0)
        totals = seen.totals()
        caller.end()
        unfinished = seen.programs.take_ended({caller.pid})[2]
    barrier, start = totals["mpi Barrier"], totals["mpi Start"]
    assert [barrier[name] for name in ("operations", "completed", "lost")] == [5, 3, 2]
    assert [start[name] for name in ("operations", "completed", "unsized")] == [1, 1, 1]
    assert len(unfinished) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_start_of_a_request_that_cannot_be_read_leaves_nothing_under_way(
    library: Path, mode: tuple[AttachKind, EnqueueTime]
) -> None:
    """As where its page is not in memory."""
    with Caller(library) as caller, followed(library, caller, mode) as seen:
        caller.call("MPI_Start", 2, 4096)
        assert seen.under_way() == 0
        start = seen.totals()["mpi Start"]
    assert [start[name] for name in ("operations", "completed", "lost")] == [2, 0, 2]


def test_an_entry_is_read_and_gone_at_once_and_its_place_is_free(library: Path) -> None:
    with Caller(library, user=MODEST) as caller, followed(library, caller) as seen:
        caller.call("ucp_put_nbx", 1, 77, 0, 1000, request(caller), 0, parameters(caller))
        tid = seen.programs.read().tids.tobytes()
        threads = seen.programs._threads
        taken = threads.take(tid)
        assert taken is not None
        assert int(taken["tgid"][0]) == caller.pid
        assert (threads.take(tid), threads.lookup(tid)) == (None, None)
        seen.nccl.shares.flush()
        assert held(seen.nccl, "transfer_threads") == {(MODEST, 0): 0, (NOBODY, 0): 0}


def test_a_user_with_many_requests_leaves_room_for_another(library: Path) -> None:
    entries = 24
    with (
        Caller(library, user=GREEDY) as one,
        Caller(library, user=MODEST) as other,
        followed(library, one, most_entries=entries) as seen,
    ):
        plain, theirs = parameters(one), parameters(other)
        for number in range(40):
            one.call("ucp_put_nbx", 1, 77, 0, 1, 4096 + 64 * number, 0, plain)
        assert seen.under_way() == entries // 3
        total = seen.totals()["ucx Put"]
        assert (total["operations"], total["bytes"], total["lost"]) == (40, 40, 40 - entries // 3)
        other.call("ucp_put_nbx", 1, 77, 0, 1, 4096, 0, theirs)
        assert Followed(seen.nccl, seen.programs, other.pid).under_way() == 1
        one.end()
        keys, totals, unfinished, _ = seen.programs.take_ended({one.pid})
        assert len(unfinished) == entries // 3, "what a process leaves is not complete"
        assert int(totals["operations"].sum()) == 40
        assert (keys["tgid"] == one.pid).all()
        assert seen.under_way() == 0


def test_places_that_a_thread_keeps_for_its_next_requests_are_given_back_with_it(library: Path) -> None:
    with Caller(library, user=MODEST) as caller, followed(library, caller) as seen:
        plain = parameters(caller)
        several = [request(caller) for _ in range(10)]
        for _ in range(3):
            for one in several:
                caller.call("ucp_put_nbx", 1, 77, 0, 1000, one, 0, plain)
            for one in several:
                caller.call("ucp_request_free", 1, one)
        assert seen.programs.read().threads["spare"].tolist() == [MOST_SPARE]
        assert held(seen.nccl, "transfer_requests") == {(MODEST, 0): MOST_SPARE, (NOBODY, 0): MOST_SPARE}
        caller.end()
        seen.programs.take_ended({caller.pid})
        assert held(seen.nccl, "transfer_requests") == {(MODEST, 0): 0, (NOBODY, 0): 0}


def held(programs: NcclPrograms, table: str) -> dict[tuple[int, int], int]:
    """Places of a table that a user, and all of them, have."""
    number = SHARED_TABLES.index(table)
    (keys, taken), (freed_keys, freed) = programs.shares._taken.read(), programs.shares._freed.read()
    found = {
        (int(key["uid"]), 0): int(one["taken"][number]) for key, one in zip(keys, taken, strict=True) if not key["tgid"]
    }
    for key, one in zip(freed_keys, freed, strict=True):
        if not key["tgid"]:
            found[int(key["uid"]), 0] -= int(one["freed"][number])
    return found


def test_what_is_under_way_when_the_probes_come_off_is_given_up(library: Path) -> None:
    """It ends unseen: told of as under way it would be a stall for as long as its process lives."""
    with Caller(library) as caller, ExitStack() as stack:
        nccl = NcclPrograms.load(ProgramSettings())
        stack.callback(nccl.close)
        watch = TransferWatch(
            lambda: TransferPrograms.load(nccl, most_entries=4096), PROCFS, InProcess(), SystemClock()
        )
        stack.callback(watch.close)
        identity = identity_of(PROCFS, caller.pid)
        assert identity is not None
        mapped = [one for one in executable_mappings(PROCFS, caller.pid) if one.path == str(library)]
        watch.sighted(identity, Tenant(0), mapped)
        eventually(lambda: watch.follow() == [] and watch.follows)
        address, plain = caller.memory(4096), parameters(caller)
        caller.call("ucp_put_nbx", 1, 77, 0, 1000, request(caller, 1, 0), 0, plain)
        caller.start("MPI_Allreduce", address, 0, 100, 0x4C00080B, 0, 0)
        eventually(lambda: len(watch.under_way()) == 2)
        watch.set_attached(False)
        assert (watch.under_way(), watch.facts().under_way) == ((), ())
        eventually(lambda: watch.update() == [] and sum(one.unfollowed for one in watch.facts().totals) == 2)
        caller.store(address, 1, 8)
        caller.finish()
        eventually(lambda: watch.set_attached(True) == [] and watch.follows)
        assert watch.under_way() == ()
        caller.call("ucp_put_nbx", 1, 77, 0, 1000, 0, 0, plain)
        totals = {one.op: (one.operations, one.unfollowed) for one in watch.facts().totals}
        assert totals == {"Put": (2, 1), "AllReduce": (1, 1)}
        watch.set_attached(False)
        watch.set_attached(True)
        eventually(lambda: watch.update() == [] and watch.follows)
        caller.call("ucp_put_nbx", 1, 77, 0, 1000, request(caller, 1, 0), 0, plain)
        caller.end()
        watch.process_gone(identity)
        totals = {one.op: (one.operations, one.unfollowed) for one in watch.facts().totals}
    assert totals == {"Put": (3, 2), "AllReduce": (1, 1)}, "nor is it seen of a process that has ended"


def test_a_user_with_many_peers_keeps_totals_that_are_whole(library: Path) -> None:
    with Caller(library, user=GREEDY) as caller, followed(library, caller, most_entries=24) as seen:
        plain = parameters(caller)
        caller.sweep("ucp_put_nbx", 0, 40, 0, 0, 5, 0, 0, plain)
        overflow = seen.programs.overflow()
        total = seen.totals()["ucx Put"]
        operations = total["operations"] + int(overflow["operations"].sum())
        assert (operations, total["bytes"] + int(overflow["bytes"].sum())) == (40, 200)


def test_where_a_request_has_its_status_is_told_by_the_librarys_own_code(library: Path) -> None:
    with library.open("rb") as file, Elf.open(file.fileno()) as elf:
        assert ucx_status_distance(elf) == DISTANCE
