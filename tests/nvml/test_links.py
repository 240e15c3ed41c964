"""What is read of GPUs and NVLinks. The driver's library is simulated (tests/nvml/stub.c)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.probes.installation import remedy_for_missing_extra
from railscope.probes.nvlink.links import GpuLinks, GpuReading, LinkReading, refresh_seconds
from railscope.probes.nvlink.nvml import ALL_LINKS, NvmlError, NvmlMissing, NvmlSession
from tests.nvml.stub import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    NOT_SUPPORTED,
    TIMEOUT,
    UNSIGNED_INT,
    UNSIGNED_LONG_LONG,
    VERSION_MISMATCH,
    Stub,
    link_lines,
)
from tests.unit.netdev_messages import SteppedClock

SECOND = 1_000_000_000


@pytest.fixture
def session(stub: Stub) -> Iterator[NvmlSession]:
    stub.say("gpus 2")
    session = NvmlSession.open(stub.library)
    yield session
    stub.say("release")
    session.close()


def links_of(session: NvmlSession, clock: SteppedClock | None = None, index: int = 0) -> GpuLinks:
    return GpuLinks(session, session.handle(index), clock or SteppedClock())


def by_link(reading: GpuReading) -> dict[int | None, LinkReading]:
    return {link.link: link for link in reading.links}


def test_a_gpu_is_known_by_its_address_as_sysfs_writes_it(session: NvmlSession) -> None:
    gpu = session.handle(1)
    assert session.gpu_count() == 2
    assert session.pci_address(gpu) == "0000:1c:00.0"
    assert session.uuid(gpu) == "GPU-00000000-0000-0000-0000-000000000001"
    assert session.name(gpu) == "Simulated GPU"


def test_data_counters_are_kibibytes_and_shown_as_bytes(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, range(18)))
    stub.count(0, 138, 3, 5)
    stub.count(0, 139, 3, 2**50)
    stub.count(0, 162, 3, 7)
    reading = links_of(session).read()
    assert [link.link for link in reading.links] == list(range(18))
    assert by_link(reading)[3] == LinkReading(
        link=3,
        up=True,
        counted="data",
        transmit_bytes=5 * 1024,
        receive_bytes=2**60,
        errors=(("replay", 0), ("recovery", 7), ("crc", 0)),
        speed_bytes_per_second=26_562_000_000,
        remote="0000:90:00.0",
        remote_type="switch",
    )


def test_what_a_gpu_does_not_support_is_absent_not_zero(session: NvmlSession, stub: Stub) -> None:
    stub.say("link 0 0 1 -1 0", f"field 0 138 0 {NOT_SUPPORTED} 3 0", "fabric 0 -1 0")
    reading = links_of(session).read()
    assert by_link(reading)[0] == LinkReading(0, True, None, None, None, (), None, None, None)
    assert reading.fabric is None
    assert (reading.pcie_transmit_bytes, reading.pcie_receive_bytes) == (None, None)


def test_a_half_supported_pair_of_byte_counters_is_not_used(session: NvmlSession, stub: Stub) -> None:
    stub.say("link 0 0 1 2 90")
    stub.count(0, 138, 0, 1)
    stub.count(0, 140, 0, 3)
    stub.count(0, 141, 0, 4)
    link = by_link(links_of(session).read())[0]
    assert (link.counted, link.transmit_bytes, link.receive_bytes) == ("raw", 3 * 1024, 4 * 1024)


def test_the_counters_of_nvlink_5_are_plain_bytes(session: NvmlSession, stub: Stub) -> None:
    stub.say("link 0 0 1 2 90")
    stub.count(0, 202, 0, 1001)
    stub.count(0, 204, 0, 1002)
    stub.count(0, 207, 0, 3)
    link = by_link(links_of(session).read())[0]
    assert (link.counted, link.transmit_bytes, link.receive_bytes) == ("link", 1001, 1002)
    assert link.errors == (("buffer_overrun", 3),)


def test_where_links_cannot_be_asked_their_sum_is_read(session: NvmlSession, stub: Stub) -> None:
    stub.say("link 0 0 1 2 90", "link 0 1 1 2 90")
    stub.count(0, 202, ALL_LINKS, 2001)
    stub.count(0, 204, ALL_LINKS, 2002)
    stub.count(0, 38, 0, 9)
    links = by_link(links_of(session).read())
    assert (links[0].transmit_bytes, links[1].transmit_bytes) == (None, None)
    together = links[None]
    assert (together.counted, together.transmit_bytes, together.receive_bytes) == ("link", 2001, 2002)
    assert together.errors == (("crc_flit", 9),)


def test_a_driver_too_old_for_the_newer_fields_still_tells_the_older_ones(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, [0]), "refuse-fields-from 197")
    stub.count(0, 138, 0, 1)
    link = by_link(links_of(session).read())[0]
    assert (link.counted, link.transmit_bytes) == ("data", 1024)
    assert [kind for kind, _ in link.errors] == ["replay", "recovery", "crc"]


@pytest.mark.parametrize("by_field", [False, True], ids=["by-call", "by-field"])
def test_an_inactive_link_is_down_and_a_sleeping_one_up(session: NvmlSession, stub: Stub, by_field: bool) -> None:
    stub.say("link 0 0 0 2 90", "link 0 4 2 0 1c", *(["states 0"] if by_field else []))
    links = by_link(links_of(session).read())
    assert {number: link.up for number, link in links.items()} == {0: False, 4: True}
    assert (links[4].remote, links[4].remote_type) == ("0000:1c:00.0", "gpu")


@pytest.mark.parametrize("by_field", [False, True], ids=["by-call", "by-field"])
def test_a_link_that_goes_down_is_seen_at_the_next_reading(session: NvmlSession, stub: Stub, by_field: bool) -> None:
    stub.say("link 0 0 1 2 90", "link 0 1 1 2 90", *(["states 0"] if by_field else []))
    links = links_of(session)
    assert [link.up for link in links.read().links] == [True, True]
    stub.say("link 0 0 0 2 90")
    assert [link.up for link in links.read().links] == [False, True]


def test_what_rarely_changes_is_made_anew_only_for_the_link_where_it_did(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, range(3)))
    links = links_of(session)
    before = by_link(links.read())
    stub.count(0, 138, 0, 7)
    stub.count(0, 162, 1, 9)
    after = by_link(links.read())
    assert (after[0].transmit_bytes, after[1].errors) == (7 * 1024, (("replay", 0), ("recovery", 9), ("crc", 0)))
    assert [after[link].errors is before[link].errors for link in range(3)] == [True, False, True]
    stub.say(f"field 0 162 1 {TIMEOUT} 3 0", f"field 0 164 2 {TIMEOUT} 3 0")
    missed = by_link(links.read())
    assert missed[1].errors == (("replay", 0), ("crc", 0))
    assert (missed[2].speed_bytes_per_second, missed[0].speed_bytes_per_second) == (None, 26_562_000_000)


def test_a_field_that_gets_supported_later_is_found_again_within_half_a_minute(
    session: NvmlSession, stub: Stub
) -> None:
    clock = SteppedClock()
    stub.say("link 0 0 0 2 90")
    links = links_of(session, clock)
    assert by_link(links.read())[0].counted is None
    stub.say(*link_lines(0, [0]))
    assert by_link(links.read())[0].counted is None
    clock.now_ns += 31 * SECOND
    assert by_link(links.read())[0].counted == "data"


def test_an_answer_missed_once_does_not_change_what_is_counted(session: NvmlSession, stub: Stub) -> None:
    clock = SteppedClock()
    stub.say(*link_lines(0, [0]))
    links = links_of(session, clock)
    assert by_link(links.read())[0].counted == "data"
    clock.now_ns += 31 * SECOND  # everything is asked for again, just when the payload counters do not answer
    stub.say(*(f"field 0 {field} 0 {TIMEOUT} 3 0" for field in (138, 139)))
    assert by_link(links.read())[0].counted is None
    stub.say(*link_lines(0, [0]))
    assert by_link(links.read())[0].counted == "data"


def test_fabric_state_and_health_are_read(session: NvmlSession, stub: Stub) -> None:
    stub.say(f"fabric 0 3 {1 << 0 | 2 << 2 | 1 << 4}")
    fabric = links_of(session).read().fabric
    assert fabric is not None
    assert (fabric.state, fabric.error) == ("completed", 0)
    assert fabric.unhealthy == ("degraded_bandwidth", "route_unhealthy")


@pytest.mark.parametrize(
    ("mask", "complaints"),
    [
        (0, ()),
        (0x1AA, ()),
        (0x11AA, ()),  # a partition is assigned, and the configuration is sound
        (1280, ("insufficient_nvlinks",)),
        (
            5461,
            (
                *("degraded_bandwidth", "route_recovery", "route_unhealthy", "access_timeout_recovery"),
                "insufficient_nvlinks",
            ),
        ),
        (2 << 8, ("incorrect_system_guid",)),
        (3 << 8, ("incorrect_chassis_serial",)),
        (4 << 8, ("no_partition",)),
        (6 << 8, ("incompatible_gpu_firmware",)),
        (7 << 8, ("invalid_location",)),
        (8 << 8, ("gpu_state_invalid",)),
        (12 << 8, ("incorrect_configuration_12",)),
        (2 << 12 | 2 << 14, ("partition_not_assigned", "fabric_manager_disconnected")),
    ],
)
def test_every_bit_of_the_health_mask_has_its_words(
    session: NvmlSession, stub: Stub, mask: int, complaints: tuple[str, ...]
) -> None:
    stub.say(f"fabric 0 3 {mask}")
    fabric = links_of(session).read().fabric
    assert fabric is not None
    assert (fabric.unhealthy, fabric.health_mask) == (complaints, mask)


def test_a_gpu_that_the_fabric_refused_is_completed_and_unhealthy(session: NvmlSession, stub: Stub) -> None:
    stub.say("fabric 0 3 0", "joined 0 999 32766 a7")
    fabric = links_of(session).read().fabric
    assert fabric is not None
    assert (fabric.state, fabric.error, fabric.unhealthy) == ("completed", 999, ("registration_failed",))
    assert (fabric.cluster, fabric.clique) == ("a7a7a7a7-a7a7-a7a7-a7a7-a7a7a7a7a7a7", 32766)
    stub.say("fabric 0 2 0", "joined 0 0 0 0")
    fabric = links_of(session).read().fabric
    assert fabric is not None
    assert (fabric.state, fabric.unhealthy, fabric.cluster) == ("in_progress", (), "")


def test_pcie_bytes_are_read_only_where_they_cannot_wrap_unseen(session: NvmlSession, stub: Stub) -> None:
    stub.count(0, 197, 0, 11, UNSIGNED_LONG_LONG)
    stub.count(0, 198, 0, 12, UNSIGNED_INT)
    reading = links_of(session).read()
    assert (reading.pcie_transmit_bytes, reading.pcie_receive_bytes) == (11, None)


def test_a_lost_gpu_fails_and_says_so_while_the_other_is_read(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, [0]), *link_lines(1, [0]))
    first, second = links_of(session, index=0), links_of(session, index=1)
    first.read()
    second.read()
    stub.say(f"fail 0 {GPU_IS_LOST}")
    with pytest.raises(NvmlError, match="GPU is lost") as caught:
        first.read()
    assert caught.value.gpu_lost
    assert second.read().links


def test_a_loss_that_only_the_values_tell_of_fails_too(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, [0]))
    links = links_of(session)
    links.read()
    stub.say(f"field 0 138 0 {GPU_IS_LOST} 3 0")
    with pytest.raises(NvmlError) as caught:
        links.read()
    assert caught.value.gpu_lost


def test_one_value_that_times_out_leaves_the_others(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, [0, 1]))
    links = links_of(session)
    links.read()
    stub.say(f"field 0 138 0 {TIMEOUT} 3 0")
    read = by_link(links.read())
    assert (read[0].transmit_bytes, read[0].receive_bytes) == (None, None)
    assert read[1].transmit_bytes == 0


def test_a_gpu_whose_every_value_times_out_fails_instead_of_looking_idle(session: NvmlSession, stub: Stub) -> None:
    stub.say("link 0 0 1 2 90", *(f"field 0 {field} 0 {TIMEOUT} 3 0" for field in (138, 139)))
    with pytest.raises(NvmlError, match="Timeout"):
        links_of(session).read()


def test_a_missing_library_is_said_in_one_line_with_a_remedy() -> None:
    with pytest.raises(NvmlMissing, match=r"^libnvidia-none\.so\.1 cannot be loaded$") as caught:
        NvmlSession.open("libnvidia-none.so.1")
    assert "install the NVIDIA driver" in caught.value.remedy


def test_a_file_that_is_no_library_is_said_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "libnvidia-ml.so.1"
    file.write_text("not a library")
    with pytest.raises(NvmlMissing, match=rf"^{file}: [^\n]+$"):
        NvmlSession.open(str(file))


def test_missing_bindings_name_the_extra(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlMissing, match="nvidia-ml-py is not") as caught:
        NvmlSession.open(stub.library)
    assert caught.value.remedy == remedy_for_missing_extra("nvlink")


@pytest.mark.parametrize("code", [DRIVER_NOT_LOADED, VERSION_MISMATCH])
def test_a_driver_that_is_not_there_is_an_error_of_the_session(stub: Stub, code: int) -> None:
    stub.say(f"init {code}")
    with pytest.raises(NvmlError) as caught:
        NvmlSession.open(stub.library)
    assert caught.value.session_lost


class TickingCounter:
    """A clock that lets a counter change every `every_ms` of its time."""

    def __init__(self, stub: Stub, every_ms: int) -> None:
        self.now_ns = SECOND
        self._stub = stub
        self._every_ns = every_ms * 1_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)
        self._stub.count(0, 138, 0, self.now_ns // self._every_ns)


def test_the_time_between_two_changes_of_a_counter_is_measured(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, [0]))
    seconds = refresh_seconds(session, session.handle(0), (138, 0), TickingCounter(stub, every_ms=20))
    assert seconds == pytest.approx(0.020, abs=0.002)


def test_an_idle_counter_has_no_refresh_rate(session: NvmlSession, stub: Stub) -> None:
    stub.say(*link_lines(0, [0]))
    assert refresh_seconds(session, session.handle(0), (138, 0), SteppedClock()) is None
