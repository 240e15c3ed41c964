"""Both sides of the boundary with the kernel agree: the headers of the BPF programs and the numpy dtypes."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.loading.bcc_source import read_source
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType, Op, data_type_name, op_name
from railscope.probes.nccl.layouts.layout import CommLayout
from railscope.probes.nccl.programs import calls as programs
from railscope.probes.nccl.programs.calls import CallRings, EnqueueTime, ProgramSettings
from railscope.probes.nccl.records import calls as records
from railscope.probes.rings import slots as slot_rings
from tests.nccl.library import REPOSITORY
from tests.unit.headers import asserted, compare, constants, enumeration

HEADER = (REPOSITORY / "probes/bpf/nccl.h").read_text()
PROGRAM = (REPOSITORY / "probes/bpf/nccl.bpf.c").read_text()
ARITHMETIC = (REPOSITORY / "probes/bpf/arithmetic.h").read_text()


@pytest.mark.parametrize("name", records.SIZES)
def test_every_dtype_has_the_fields_of_its_struct(name: str) -> None:
    compare(HEADER, name, *records.SIZES[name])


def test_every_asserted_struct_has_a_dtype() -> None:
    assert asserted(HEADER) == set(records.SIZES)


def test_stats_and_lifecycle_kinds_are_numbered_alike() -> None:
    assert enumeration(HEADER, "stat") == [f"STAT_{stat.name}" for stat in records.Stat] + ["STAT_COUNT"]
    assert enumeration(HEADER, "lifecycle_kind") == [f"LIFECYCLE_{kind.name}" for kind in records.LifecycleKind]
    assert [int(stat) for stat in records.Stat] == list(range(len(records.Stat)))
    assert [int(kind) for kind in records.LifecycleKind] == list(range(len(records.LifecycleKind)))


def test_shared_constants_are_the_same() -> None:
    found = constants(HEADER)
    assert found["UNIQUE_ID_BYTES"] == records.UNIQUE_ID_BYTES
    assert found["NO_OFFSET"] == records.NO_OFFSET
    assert 1 << found["AGGREGATE_SLOT_BITS"] == records.AGGREGATE_SLOTS
    assert 1 << found["COMMUNICATOR_SLOT_BITS"] == records.COMMUNICATOR_SLOTS
    assert found["UNREADABLE_PROCESSES"] == records.UNREADABLE_PROCESSES
    assert (found["SHARED_TABLES"],) == records.SHARE["taken"].shape >= (len(records.SHARED_TABLES),)
    assert found["OP_UNKNOWN"] == Op.Unknown
    assert found["OP_COUNT"] == len(Op)
    assert found["DATA_TYPE_UNKNOWN"] == DataType.Unknown


def test_the_reader_of_slots_finds_what_the_programs_write() -> None:
    assert records.CALL_RING.itemsize == slot_rings.RING_ENTRY_BYTES
    assert records.CALL_RING.names is not None
    assert records.CALL_RING.names.index("reserved") == slot_rings._RESERVED
    assert records.CALL_RING.names.index("taken") == slot_rings._TAKEN
    assert records.CALL_SLOT.fields is not None
    assert records.CALL_SLOT.fields["stamp"][1] == records.CALL_EVENT.itemsize


def test_the_kernels_element_sizes_are_those_of_the_data_types() -> None:
    shifts = re.search(r"#define DATA_TYPE_SHIFTS (0x[0-9a-f]+)", ARITHMETIC)
    count = re.search(r"#define DATA_TYPES (\d+)", ARITHMETIC)
    assert shifts is not None
    assert count is not None
    known = [data_type for data_type in DataType if data_type is not DataType.Unknown]
    assert int(count[1]) == len(known)
    for data_type in known:
        assert 1 << ((int(shifts[1], 16) >> 4 * data_type) & 15) == DATA_TYPE_BYTES[data_type]


def test_operations_with_a_peer_or_root_are_those_that_the_kernel_keeps_it_for() -> None:
    mask = re.search(r"1U << call->op\) & (0x[0-9a-f]+)", PROGRAM)
    assert mask is not None
    kept = {op for op in Op if int(mask[1], 16) >> op & 1}
    assert kept == {Op.Broadcast, Op.Reduce, Op.Send, Op.Recv, Op.Scatter, Op.Gather, Op.PutSignal, Op.Signal}


def test_the_constants_of_the_programs_are_packed_in_their_order() -> None:
    program = read_source(REPOSITORY / "probes/bpf/nccl.bpf.c")
    declared = re.findall(r"^const volatile __u(\d+) (\w+)", program, re.MULTILINE)
    assert [name for _, name in declared] == [
        "pid_namespace_device",
        "pid_namespace_inode",
        "only_observed_processes",
        "write_events",
        "sample_shift",
        "communicator_entries",
        "aggregate_entries",
        "task_nsproxy",
        "nsproxy_net_ns",
        "net_ns_inum",
        *("task_cred", "cred_user_ns", "user_ns_level", "user_ns_parent", "user_ns_owner"),
        *("task_thread_pid", "pid_level", "pid_numbers", "pid_ns_user_ns", "pid_ns_inum"),
        "call_ring_mask",
        "call_slot_bits",
    ]
    settings = ProgramSettings(
        only_observed_processes=True, write_events=False, sample_every=64, communicator_entries=100
    )
    packed = programs.constants(settings, EnqueueTime.PAIR) + CallRings(16, 1 << 20).constants
    assert len(packed) == sum(int(bits) // 8 for bits, _ in declared)
    assert struct.unpack_from("<IIIIIIII", packed, 16) == (1, 0, 6, 100, 65_536, 0, 0, 0)
    assert struct.unpack_from("<II", packed, len(packed) - 8) == (15, 14)
    assert struct.unpack_from("<I", programs.constants(settings, EnqueueTime.OFF), 24)[0] >= 32


@given(st.lists(st.one_of(st.none(), st.integers(0, 1 << 24)), min_size=8, max_size=8))
def test_a_layouts_offsets_reach_the_kernel_and_gaps_are_marked(optional: list[int | None]) -> None:
    names = ("comm_hash", "nvml_dev", "bus_id", "node", "n_nodes", "local_rank", "local_ranks", "end_magic")
    layout = CommLayout("build-id", "2.32.3", 2, 3, 4, **dict(zip(names, optional, strict=True)))
    (record,) = np.frombuffer(programs._layout_record(layout), records.COMM_LAYOUT)
    assert int(record["known"]) == 1
    assert [int(record[name]) for name in ("rank", "nranks", "cuda_dev")] == [2, 3, 4]
    for name, offset in zip(names, optional, strict=True):
        assert int(record[name]) == (0xFFFFFFFF if offset is None else offset)


def test_no_layout_is_an_unknown_one() -> None:
    (record,) = np.frombuffer(programs._layout_record(None), records.COMM_LAYOUT)
    assert int(record["known"]) == 0


def test_names_of_operations_and_data_types() -> None:
    assert (op_name(4), op_name(15), op_name(200)) == ("AllReduce", "unknown", "unknown")
    assert (data_type_name(9), data_type_name(15), data_type_name(99)) == ("bfloat16", "unknown", "unknown")
