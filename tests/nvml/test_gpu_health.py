"""What is read of a GPU's condition. The driver's library is simulated (tests/nvml/stub.c)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.nvlink.gpu_health import GpuHealth, GpuHealthReader, bit_error_ratio
from railscope.probes.nvlink.nvml import NvmlError, NvmlSession
from tests.nvml.stub import GPU_IS_LOST, TIMEOUT, UNSIGNED_INT, UNSIGNED_LONG_LONG, Stub


@pytest.fixture
def session(stub: Stub) -> Iterator[NvmlSession]:
    stub.say("gpus 1")
    session = NvmlSession.open(stub.library)
    yield session
    session.close()


def reader(session: NvmlSession) -> GpuHealthReader:
    return GpuHealthReader(session, session.handle(0))


def test_memory_pcie_clocks_and_the_driver_s_wish_are_read(session: NvmlSession, stub: Stub) -> None:
    for field, value in {3: 12, 4: 0, 5: 40, 6: 2, 94: 7, 142: 1, 143: 3, 144: 1, 145: 0}.items():
        stub.count(0, field, 0, value, UNSIGNED_LONG_LONG if field < 10 else UNSIGNED_INT)
    stub.count(0, 182, 0, 9, UNSIGNED_INT)
    stub.count(0, 230, 0, 4, UNSIGNED_INT)
    stub.say(f"clocks 0 {0x1 | 0x40 | 0x80}")
    assert reader(session).read([]) == GpuHealth(
        ecc_errors=(
            ("corrected", "volatile", 12),
            ("uncorrected", "volatile", 0),
            ("corrected", "aggregate", 40),
            ("uncorrected", "aggregate", 2),
        ),
        remapped_rows=(("corrected", 1), ("uncorrected", 3)),
        remap_pending=True,
        remap_failed=False,
        pcie_errors=(("replay", 7), ("lcrc", 9)),
        slowed_by=("hardware_thermal", "power_brake"),
        recovery_action="drain_and_reset",
    )


def test_bit_errors_and_mended_blocks_are_by_link(session: NvmlSession, stub: Stub) -> None:
    stub.count(0, 220, 5, 3 << 8 | 12)
    stub.count(0, 222, 5, 15 << 8 | 7)
    stub.count(0, 235, 5, 10**15)
    stub.count(0, 250, 5, 2)
    found = reader(session).read([4, 5])
    assert found.bit_error_ratios == ((5, "effective", 3e-12), (5, "symbol", 15e-7))
    assert found.fec_blocks == ((5, 0, 10**15), (5, 15, 2))


def test_a_gpu_that_tells_nothing_of_itself_has_nothing(session: NvmlSession, stub: Stub) -> None:
    stub.say("clocks 0 -1")
    assert reader(session).read([0]) == GpuHealth()


def test_a_driver_too_old_for_newer_fields_still_tells_the_older_ones(session: NvmlSession, stub: Stub) -> None:
    stub.count(0, 4, 0, 1)
    stub.say("refuse-fields-from 173")
    assert reader(session).read([0]).ecc_errors == (("uncorrected", "volatile", 1),)


def test_what_has_no_value_is_asked_for_again_later(session: NvmlSession, stub: Stub) -> None:
    one = reader(session)
    stub.say(f"field 0 94 0 {TIMEOUT} 1 0")
    assert one.read([]).pcie_errors == ()
    stub.count(0, 94, 0, 3, UNSIGNED_INT)
    found = [one.read([]).pcie_errors for _ in range(20)]
    assert found[0] == ()
    assert found[-1] == (("replay", 3),)


def test_a_lost_gpu_is_an_error(session: NvmlSession, stub: Stub) -> None:
    one = reader(session)
    stub.say(f"fail 0 {GPU_IS_LOST}")
    with pytest.raises(NvmlError) as error:
        one.read([])
    assert error.value.gpu_lost


@given(st.integers(0, 2**64 - 1))
def test_any_packed_ratio_is_a_ratio(packed: int) -> None:
    assert 0 <= bit_error_ratio(packed) <= 15
