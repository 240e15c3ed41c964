"""The counters of real RDMA devices, though in software: clean traffic, loss, a link that goes down."""

from __future__ import annotations

import pytest

from tests.vm.conftest import BOOT_SECONDS, Seen
from tests.vm.guest_rdma import MESSAGE_BYTES, MESSAGES, RECEIVER, SENDER

pytestmark = [pytest.mark.vm, pytest.mark.timeout(BOOT_SECONDS + 60)]

FROM, TO = f"{SENDER}/1", f"{RECEIVER}/1"
ACTIVE_MTU_BYTES = 1024
PACKETS = MESSAGES * MESSAGE_BYTES // ACTIVE_MTU_BYTES


def test_ports_are_what_the_kernel_made(seen: Seen) -> None:
    ports = seen["rdma"]["ports"]
    assert sorted(ports) == [SENDER, RECEIVER]
    for device, netdev in ((SENDER, "eth0"), (RECEIVER, "eth1")):
        port = ports[device]
        assert (port["up"], port["state"], port["physical_state"]) == (True, "ACTIVE", "LinkUp")
        assert (port["netdev"], port["link_layer"]) == (netdev, "Ethernet")
        # Soft-RoCE has neither InfiniBand's counters nor a PCI function.
        assert (port["has_counters"], port["pci"], port["numa_node"], port["driver"]) == (False, "", None, "")


def test_packets_are_counted_to_the_one_and_nothing_goes_wrong(seen: Seen) -> None:
    moved = seen["rdma"]["traffic"]
    assert (moved[FROM]["sent_pkts"], moved[FROM]["rcvd_pkts"]) == (PACKETS, MESSAGES)
    assert (moved[TO]["sent_pkts"], moved[TO]["rcvd_pkts"]) == (MESSAGES, PACKETS)
    normal = {"sent_pkts", "rcvd_pkts", "rdma_sends", "rdma_recvs", "ack_deferred"}
    assert {name for counters in moved.values() for name in counters} <= normal


def test_a_reading_has_what_the_kernels_files_and_its_netlink_say(seen: Seen) -> None:
    rdma = seen["rdma"]
    assert rdma["unreadable"] == []
    bytes_unknown = {"tx_bytes": 0, "rx_bytes": 0}
    assert rdma["read"] == rdma["netlink"]
    assert rdma["read"] == {port: {**counters, **bytes_unknown} for port, counters in rdma["sysfs"].items()}


def test_no_bytes_are_claimed_where_none_are_counted(seen: Seen) -> None:
    assert seen["rdma"]["counts_bytes"] == {FROM: False, TO: False}


def test_loss_shows_as_packets_out_of_sequence_and_sent_again(seen: Seen) -> None:
    moved = seen["rdma"]["loss"]
    assert moved[TO]["out_of_seq_request"] > 0
    assert moved[FROM]["rcvd_seq_err"] > 0
    assert moved[FROM]["completer_retry_err"] > 0
    assert moved[FROM]["sent_pkts"] > PACKETS
    assert moved[TO]["rcvd_pkts"] < moved[FROM]["sent_pkts"]


def test_queue_pairs_are_those_of_the_processes_that_made_them_and_lead_to_each_other(seen: Seen) -> None:
    found = seen["rdma"]["queue_pairs"]
    pairs = {one["device"]: one for one in found["read"]["queue_pairs"] if one["pid"] is not None}
    assert {device: one["pid"] for device, one in pairs.items()} == found["pids"]
    sender, receiver = pairs[SENDER], pairs[RECEIVER]
    assert (sender["number"], sender["remote_number"]) == (receiver["remote_number"], receiver["number"])
    assert {(one["kind"], one["port"]) for one in pairs.values()} == {("RC", 1)}
    assert (sender["state"], receiver["state"]) == ("RTS", "RTR"), "this one never sends"
    assert {one["kernel_user"] for one in found["read"]["queue_pairs"] if one["pid"] is None} == {"ib_core"}
    assert sorted((one["device"], one["pid"], one["count"]) for one in found["read"]["counts"]) == [
        (SENDER, str(found["pids"][SENDER]), 1),
        (RECEIVER, str(found["pids"][RECEIVER]), 1),
    ]


def test_a_link_that_goes_down_is_counted_and_seen(seen: Seen) -> None:
    moved, ports = seen["rdma"]["down"], seen["rdma"]["ports_down"]
    assert moved[FROM]["link_downed"] == 1
    assert (ports[SENDER]["up"], ports[SENDER]["state"]) == (False, "DOWN")
