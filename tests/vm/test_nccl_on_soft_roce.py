"""The real NCCL's InfiniBand transport, on RDMA devices in software: what it hands to each, and what completes."""

from __future__ import annotations

import pytest

from tests.vm.conftest import BOOT_SECONDS, Seen
from tests.vm.guest_nccl import ITERATIONS, PATTERNS, RAILS, SIZE_BYTES

pytestmark = [pytest.mark.vm, pytest.mark.nccl, pytest.mark.timeout(BOOT_SECONDS + 60)]

RANKS = 2
ACTIVE_MTU_BYTES = 1024
of_every_job = pytest.mark.parametrize("pattern", PATTERNS)


@of_every_job
def test_what_nccl_hands_to_each_device_is_what_its_ring_sends_to_the_byte(seen: Seen, pattern: str) -> None:
    found = seen["nccl"][pattern]
    assert all(report["verified"] for report in found["reports"])
    # AllReduce 2(n-1)/n and AllGather n-1 times the size; each rank sends one message of it to the other.
    sent_bytes = ITERATIONS * SIZE_BYTES
    devices = {f"IB {device}/1" for rail in RAILS for device in rail.devices}
    assert {device: size for device, (size, _) in found["handed_over"].items()} == dict.fromkeys(
        devices, sent_bytes // len(RAILS)
    )


@of_every_job
def test_every_operation_over_rdma_is_seen_to_complete(seen: Seen, pattern: str) -> None:
    found = seen["nccl"][pattern]
    assert [set(report["calls"].values()) for report in found["reports"]] == [
        {ITERATIONS * (RANKS if pattern == "sendrecv" else 1)}
    ] * RANKS
    assert found["completed"] == [ITERATIONS] * RANKS


def test_the_devices_carried_what_was_handed_to_them(seen: Seen) -> None:
    found = seen["nccl"]["allreduce"]
    for device, packets in found["sent_packets"].items():
        size, _ = found["handed_over"][f"IB {device}/1"]
        assert packets >= size // ACTIVE_MTU_BYTES
