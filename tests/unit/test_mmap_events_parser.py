"""Records of mapping events are read whole or counted as lost; simulated records, packed as the kernel packs them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.libraries import mmap_events
from railscope.probes.libraries.mmap_events import (
    MmapEvent,
    MmapEvents,
    MmapEventsError,
    online_cpus,
    parse_records,
    unwrap,
)
from railscope.probes.loading.bpf_syscall import KernelRefusal

EVENT = MmapEvent(
    pid=10,
    tid=11,
    address=0x7F0000000000,
    length=0x200000,
    device=(0x103, 2),
    inode=1 << 40,
    path="/opt/my libs/libnccl.so.2",
    time_ns=123_456_789_012,
)
PROT_READ, PROT_EXEC = 1, 4


def packed(event: MmapEvent, *, protection: int = PROT_READ | PROT_EXEC, misc: int = 2) -> bytes:
    """One PERF_RECORD_MMAP2 with the time as its sample id."""
    path = event.path.encode() + b"\0"
    path += bytes(-len(path) % 8)
    body = struct.pack("<IIQQQ", event.pid, event.tid, event.address, event.length, 0x1000)
    body += struct.pack("<IIQQII", *event.device, event.inode, 99, protection, 2)
    body += path + struct.pack("<Q", event.time_ns)
    return struct.pack("<IHH", 10, misc, 8 + len(body)) + body


def lost(count: int) -> bytes:
    return struct.pack("<IHHQQQ", 2, 0, 32, 5, count, EVENT.time_ns)


OTHER = struct.pack("<IHHQQ", 3, 0, 24, 1, 2)


def test_a_mapping_is_read_with_everything_the_kernel_said() -> None:
    records = parse_records(OTHER + packed(EVENT) + OTHER)
    assert records.events == [EVENT]
    assert records.lost == 0


def test_losses_add_up() -> None:
    records = parse_records(lost(7) + packed(EVENT) + lost(5))
    assert (len(records.events), records.lost) == (1, 12)


def test_mappings_of_no_file_data_mappings_and_build_id_records_are_left_out() -> None:
    anonymous = MmapEvent(10, 11, 0x1000, 0x1000, (0, 0), 0, "//anon", 1)
    data = packed(anonymous) + packed(EVENT, protection=PROT_READ)
    data += packed(EVENT, misc=1 << 13) + packed(EVENT, misc=1 << 14)
    assert parse_records(data).events == []
    assert parse_records(data).lost == 0


@pytest.mark.parametrize("broken", [b"\n\0\0", struct.pack("<IHH", 10, 0, 0), struct.pack("<IHH", 10, 0, 4000)])
def test_a_record_that_cannot_be_whole_ends_the_reading_as_one_loss(broken: bytes) -> None:
    records = parse_records(packed(EVENT) + broken)
    assert (records.events, records.lost) == ([EVENT], 1)


def test_a_record_too_short_for_its_kind_is_one_loss_and_the_next_is_read() -> None:
    records = parse_records(struct.pack("<IHHQ", 10, 0, 16, 0) + packed(EVENT))
    assert (records.events, records.lost) == ([EVENT], 1)


@given(st.integers(0, 3 * len(packed(EVENT))))
def test_a_cut_stretch_yields_the_whole_records_and_one_loss_for_the_rest(keep: int) -> None:
    size = len(packed(EVENT))
    records = parse_records((packed(EVENT) * 3)[:keep])
    assert records.events == [EVENT] * (keep // size)
    assert records.lost == (1 if keep % size else 0)


@given(st.binary(max_size=600))
def test_any_bytes_are_read_without_an_exception(data: bytes) -> None:
    assert parse_records(data).lost >= 0


@given(
    st.lists(
        st.builds(
            MmapEvent,
            pid=st.integers(0, 2**22),
            tid=st.integers(0, 2**22),
            address=st.integers(0, 2**64 - 1),
            length=st.integers(0, 2**64 - 1),
            device=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
            inode=st.integers(1, 2**64 - 1),
            path=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
            time_ns=st.integers(0, 2**64 - 1),
        ),
        max_size=5,
    )
)
def test_what_was_packed_is_read_back(events: list[MmapEvent]) -> None:
    assert parse_records(b"".join(map(packed, events))).events == events


@given(st.binary(min_size=64, max_size=64), st.integers(0, 2**40), st.integers(0, 64))
def test_a_ring_is_unwrapped_in_order(ring: bytes, tail: int, length: int) -> None:
    memory = b"control!" + ring
    assert unwrap(memory, 8, 64, tail, tail + length) == bytes(ring[(tail + at) % 64] for at in range(length))


def test_a_ring_whose_positions_make_no_sense_is_empty() -> None:
    assert unwrap(bytes(72), 8, 64, 10, 9) == b""
    assert unwrap(bytes(72), 8, 64, 10, 100) == b""


def test_the_list_of_online_cpus_may_have_gaps(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/cpu"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-2,5,8-9\n")
    assert online_cpus(tmp_path) == [0, 1, 2, 5, 8, 9]


def test_a_refusal_names_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise KernelRefusal(13, "watch mappings on CPU 0: Permission denied")

    monkeypatch.setattr(mmap_events, "perf_event_open", refuse)
    with pytest.raises(MmapEventsError, match=r"needs CAP_PERFMON .*Permission denied$"):
        MmapEvents.open()


def test_the_number_of_pages_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="not 6"):
        MmapEvents.open(pages=6)
