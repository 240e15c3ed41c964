"""Who owns what on real RDMA queue pairs, though in software, and on a rail that a real NFS client uses."""

from __future__ import annotations

import pytest

from tests.vm.conftest import BOOT_SECONDS, Seen
from tests.vm.guest_nfs import CHECKPOINT_BYTES
from tests.vm.guest_owners import OWN, SHARED

pytestmark = [pytest.mark.vm, pytest.mark.nccl, pytest.mark.timeout(BOOT_SECONDS + 60)]


UCXS, NOBODYS = OWN.devices
ACROSS = {SHARED.devices[0]: SHARED.devices[1], SHARED.devices[1]: SHARED.devices[0], UCXS: UCXS}


def test_each_queue_pair_is_its_library_s_and_its_process_s_and_leads_to_the_other_end(seen: Seen) -> None:
    found = seen["owners"]
    assert found["known"], found["queue_pairs"]
    owner_of = {pid: owner for owner, pids in found["pids"].items() for pid in pids}
    mine = [one for one in found["queue_pairs"] if one["pid"] in owner_of]
    assert {one["pid"] for one in mine} == set(owner_of)
    numbers = {(one["device"], one["number"]): one for one in mine}
    for one in mine:
        assert one["owners"] == [owner_of[one["pid"]]], one
        assert (one["type"], one["port"]) == ("RC", 1)
        assert one["state"] in ("RTR", "RTS")
        other = numbers[ACROSS[one["device"]], one["remote_number"]]
        assert (other["remote_number"], other["owners"]) == (one["number"], one["owners"])
        # These connect by themselves: the kernel does not know the address of the other end.
        assert one["remote_address"] is None


def test_a_port_is_claimed_by_who_has_queue_pairs_there(seen: Seen) -> None:
    claimants: dict[str, set[str]] = {}
    for one in seen["owners"]["queue_pairs"]:
        if one["type"] not in ("GSI", "SMI"):
            claimants.setdefault(one["device"], set()).update(one["owners"])
    assert claimants == {UCXS: {"ucx"}, **{device: {"nccl", "rdma_other"} for device in SHARED.devices}}


def test_where_a_device_counts_no_bytes_none_have_an_owner(seen: Seen) -> None:
    """Soft-RoCE counts packets alone, and binds no counter to queue pairs: of bytes nothing is claimed, not even 0."""
    found = seen["owners"]
    assert {labels["device"] for labels, _ in found["shown"]["railscope_rail_info"]} == {*SHARED.devices, *OWN.devices}
    assert {device for device, count in found["sent_packets"].items() if count} == {*SHARED.devices, UCXS}
    for name in ("transmit_bytes_total", "bytes_by_owner_total", "bytes_by_origin_total", "ledger_error_ratio"):
        assert found["shown"][f"railscope_rail_{name}"] == []
    # It may be asked to count what processes make from now on, and nothing comes of it.
    assert (found["one_allowed"], found["every_allowed"]) == (False, True), found["why"]
    assert found["bound"] == []


@pytest.mark.parametrize("direction", ["transmit", "receive"])
def test_what_an_nfs_client_moves_is_storage_s(seen: Seen, direction: str) -> None:
    found = seen["nfs"]
    operations, way = (("WRITE",), "sent") if direction == "transmit" else (("READ", "READ_PLUS"), "received")
    moved_by = sum(one[way] for name, one in found["operations"].items() if name in operations)
    assert moved_by >= CHECKPOINT_BYTES
    said = sum(one[way] for one in found["operations"].values())
    owners, moved = found["by_owner"][direction], found["moved"][direction]
    assert owners["storage"] == pytest.approx(moved, rel=0.02), (found["moved"], found["by_owner"], found["sockets"])
    assert said <= owners["storage"] < 1.02 * said + 1_000_000, (said, owners)
    assert sum(owners.values()) >= moved
    assert found["error_ratio"][direction] < 0.1
