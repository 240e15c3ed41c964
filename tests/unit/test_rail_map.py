"""Which port is which rail, on simulated machines and on those of files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.config.rail_patterns import parse_rail_pattern
from railscope.agent.node.rails.gpu_affinity import MappedNic, map_rails
from railscope.probes.topology.ib_hca import parse_hca_list
from railscope.probes.topology.machine import Gpu, Nic, gpus_of_topology, nics_of_topology
from railscope.probes.topology.nccl_xml import parse_topology, read_topology
from railscope.probes.topology.paths import PathType, Place
from tests.trees.pci import (
    DGX_H100_NICS,
    SimulatedMachine,
    behind_switch,
    dgx_h100,
    p4d,
    p5,
    two_sockets,
    without_gpus,
    workstation,
)

AZURE = Path(__file__).parents[3] / "shared/data/azure-ndv4-topo.xml"
"""A sample of Azure's (azhpc-images, MIT), kept beside the checkout."""

GIGABIT = 125_000_000


def rails(mapped: Sequence[MappedNic]) -> dict[str, str]:
    """Rail by device, with the port where it is not the first."""
    return {
        entry.nic.device if entry.nic.port in (None, 1) else f"{entry.nic.device}:{entry.nic.port}": entry.rail
        for entry in mapped
        if entry.rail is not None
    }


def gpus(mapped: Sequence[MappedNic]) -> dict[str, tuple[int, ...]]:
    return {entry.nic.device: entry.gpus for entry in mapped if entry.rail is not None}


def reason(mapped: Sequence[MappedNic], device: str) -> str:
    (entry,) = [entry for entry in mapped if entry.nic.device == device]
    return entry.reason


def machine_map(machine: SimulatedMachine, **told: str) -> tuple[MappedNic, ...]:
    """`hca`: NCCL_IB_HCA, `configured`: --rail.devices, `xml`: a topology file's text."""
    return map_rails(
        machine.nics(),
        machine.gpus(),
        patterns=[parse_rail_pattern(text) for text in told.get("configured", "").split()],
        hca_lists=[parse_hca_list(value) for value in told["hca"].split()] if "hca" in told else (),
        topology=parse_topology(told["xml"].encode()) if "xml" in told else None,
    )


def nic(device: str, *switches: str, port: int | None = 1, gigabits: float | None = 400, **other: bool | None) -> Nic:
    speed = None if gigabits is None else round(gigabits * GIGABIT)
    return Nic(device, port, Place(f"0000:{device[-1]}0:00.0", switches, 0), speed, other.get("up", True))


def gpu(index: int, *switches: str) -> Gpu:
    return Gpu(index, Place(f"0000:f{index}:00.0", switches, 0))


# The machines that people have.


def test_dgx_h100_rails_are_its_gpus_and_not_its_device_numbers(tmp_path: Path) -> None:
    mapped = machine_map(dgx_h100(tmp_path))
    assert rails(mapped) == {f"mlx5_{number}": str(rail) for rail, number in enumerate(DGX_H100_NICS)}
    assert gpus(mapped) == {f"mlx5_{number}": (rail,) for rail, number in enumerate(DGX_H100_NICS)}
    assert [entry.nic.device for entry in mapped] == [
        *(f"mlx5_{number}" for number in (0, 3, 4, 5, 6, 9, 10, 11)),
        *(f"mlx5_{number}" for number in (1, 2, 7, 8)),
    ]
    assert reason(mapped, "mlx5_10") == "PIX to GPU 6, by PCI switch 0000:cc:00.0"
    assert "storage" in reason(mapped, "mlx5_8")


def test_the_azure_file_pairs_each_gpu_with_a_card_of_its_switch() -> None:
    if not AZURE.exists():
        pytest.skip(f"{AZURE} is absent")
    topology = read_topology(AZURE)
    mapped = map_rails(nics_of_topology(topology), gpus_of_topology(topology), topology=topology)
    assert rails(mapped) == {f"010{card}:00:00.0": str(card - 1) for card in range(1, 9)}
    assert gpus(mapped) == {f"010{card}:00:00.0": (card - 1,) for card in range(1, 9)}
    assert {entry.path for entry in mapped} == {PathType.PIX}
    assert all("paired in order (NCCL topology file)" in entry.reason for entry in mapped)


def test_on_p4d_two_gpus_share_a_card(tmp_path: Path) -> None:
    mapped = machine_map(p4d(tmp_path))
    assert rails(mapped) == {"rdmap16s27": "0", "rdmap32s27": "1", "rdmap144s27": "2", "rdmap160s27": "3"}
    assert [entry.gpus for entry in mapped] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert "GPUs 0 and 1" in reason(mapped, "rdmap16s27")
    assert [entry.gpu_label for entry in mapped] == ["0,1", "2,3", "4,5", "6,7"]


def test_on_p5_a_gpu_has_four_cards(tmp_path: Path) -> None:
    mapped = machine_map(p5(tmp_path))
    assert [entry.rail for entry in mapped] == [str(rail) for rail in range(8)]
    assert [entry.gpus for entry in mapped] == [(0,)] * 4 + [(1,)] * 4


def test_one_gpu_and_one_card_are_rail_0_through_the_host_bridge(tmp_path: Path) -> None:
    (entry,) = machine_map(workstation(tmp_path))
    assert (entry.rail, entry.gpus, entry.path) == ("0", (0,), PathType.PHB)
    assert entry.reason == "PHB to GPU 0, by host bridge pci0000:00"


def test_without_switches_the_numa_node_decides(tmp_path: Path) -> None:
    mapped = machine_map(two_sockets(tmp_path))
    assert rails(mapped) == {f"mlx5_{number}": str(number) for number in range(4)}
    assert gpus(mapped) == {f"mlx5_{number}": (number,) for number in range(4)}
    assert "NUMA node 1" in reason(mapped, "mlx5_2")


def test_without_gpus_rails_are_numbered_by_name_2_before_10(tmp_path: Path) -> None:
    mapped = machine_map(without_gpus(tmp_path))
    assert rails(mapped) == {f"mlx5_{number}": str(number) for number in range(12)}
    assert [entry.nic.device for entry in mapped] == [f"mlx5_{number}" for number in range(12)]
    assert {entry.gpus for entry in mapped} == {()}
    assert {entry.gpu_label for entry in mapped} == {"unknown"}


def test_ports_that_are_near_no_gpu_on_any_machine_part_are_rails_by_name() -> None:
    far = Nic("mlx5_0", 1, Place("0000:10:00.0", (), 1))
    (entry,) = map_rails([far], [Gpu(0, Place("0000:01:00.0", (), 0))])
    assert (entry.rail, entry.gpus, entry.path) == ("0", (), None)
    assert "no GPU is near" in entry.reason


# What is no rail.


def test_a_card_on_the_other_node_is_none_where_another_is_on_the_gpu_s() -> None:
    here, there = Nic("mlx5_1", 1, Place("a", (), 0)), Nic("mlx5_0", 1, Place("b", (), 1))
    mapped = map_rails([there, here], [Gpu(0, Place("c", (), 0))])
    assert rails(mapped) == {"mlx5_1": "0"}
    assert "NUMA node" in reason(mapped, "mlx5_0")


def test_a_card_whose_gpus_all_have_a_nearer_one_is_none() -> None:
    mapped = map_rails([nic("mlx5_0", "A"), nic("mlx5_1", "A", "B")], [gpu(0, "A", "B")])
    assert rails(mapped) == {"mlx5_1": "0"}
    assert reason(mapped, "mlx5_0") == "PXB to GPU 0, which has a nearer port, mlx5_1:1"


def test_the_deepest_common_switch_wins_among_equal_paths() -> None:
    cards = [nic("mlx5_0", "A", "X"), nic("mlx5_1", "A", "B", "Y")]
    mapped = map_rails(cards, [gpu(0, "A", "B", "C")])
    assert rails(mapped) == {"mlx5_1": "0"}
    assert reason(mapped, "mlx5_1") == "PXB to GPU 0, by PCI switch B"


def test_a_much_slower_card_beside_a_faster_one_is_none() -> None:
    mapped = map_rails([nic("mlx5_0", "A", gigabits=100), nic("mlx5_1", "A")], [gpu(0, "A")])
    assert rails(mapped) == {"mlx5_1": "0"}
    assert reason(mapped, "mlx5_0") == "100 Gb/s, and mlx5_1:1, as near to the same GPU, runs at 400 Gb/s"


def test_a_card_for_management_is_none_wherever_it_sits() -> None:
    cards = [nic("mlx5_0", "A"), nic("mlx5_1", "B", gigabits=25)]
    mapped = map_rails(cards, [gpu(0, "A"), gpu(1, "B")])
    assert rails(mapped) == {"mlx5_0": "0"}
    assert reason(mapped, "mlx5_1") == "25 Gb/s where others run at 400 Gb/s"


def test_a_rail_whose_link_trained_badly_stays_one() -> None:
    cards = [nic("mlx5_0", "A"), nic("mlx5_1", "B", gigabits=100)]
    assert rails(map_rails(cards, [gpu(0, "A"), gpu(1, "B")])) == {"mlx5_0": "0", "mlx5_1": "1"}


def test_a_rail_that_is_down_stays_one_and_its_speed_says_nothing() -> None:
    cards = [nic("mlx5_0", "A"), nic("mlx5_1", "B", gigabits=2.5, up=False)]
    assert rails(map_rails(cards, [gpu(0, "A"), gpu(1, "B")])) == {"mlx5_0": "0", "mlx5_1": "1"}


def test_the_second_port_of_a_card_without_a_cable_is_none() -> None:
    place = Place("0000:18:00.0", ("A",), 0)
    other = Place("0000:18:00.1", ("A",), 0)
    cards = [Nic("mlx5_0", 1, place, 400 * GIGABIT, True), Nic("mlx5_1", 1, other, 40 * GIGABIT, False)]
    mapped = map_rails(cards, [gpu(0, "A")])
    assert rails(mapped) == {"mlx5_0": "0"}
    assert reason(mapped, "mlx5_1") == "not connected, and mlx5_0:1, a port of the same card, is"
    # A card of its own is another matter: that is a rail which lost its link.
    cards[1] = Nic("mlx5_1", 1, Place("0000:19:00.0", ("A",), 0), 40 * GIGABIT, False)
    assert rails(map_rails(cards, [gpu(0, "A")])) == {"mlx5_0": "0", "mlx5_1": "1"}


def test_what_was_a_rail_stays_one_when_it_gets_slow_or_loses_its_link() -> None:
    cards = [nic("mlx5_0", "A"), nic("mlx5_1", "A", gigabits=25)]
    known = {("mlx5_1", 1)}
    assert rails(map_rails(cards, [gpu(0, "A")])) == {"mlx5_0": "0"}
    mapped = map_rails(cards, [gpu(0, "A")], known=known)
    assert rails(mapped) == {"mlx5_0": "0", "mlx5_1": "1"}
    assert gpus(mapped) == {"mlx5_0": (0,), "mlx5_1": (0,)}


# Odd hardware.


def test_two_ports_of_one_device_are_two_rails(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.gpu(behind_switch(0x16, 4, "0000:1b:00.0"), 0)
    machine.rdma("mlx4_0", behind_switch(0x16, 0, "0000:18:00.0"), 0, ports=2, gigabits=56)
    mapped = machine_map(machine)
    assert rails(mapped) == {"mlx4_0": "0", "mlx4_0:2": "1"}
    assert [entry.gpus for entry in mapped] == [(0,), (0,)]


def test_a_bond_is_one_rail(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path)
    (tmp_path / "class/infiniband/mlx5_0").rename(tmp_path / "class/infiniband/mlx5_bond_0")
    mapped = machine_map(machine)
    assert rails(mapped)["mlx5_bond_0"] == "0"
    assert rails(mapped)["mlx5_11"] == "7"


def test_two_gpus_and_four_cards_at_one_switch_are_shared_out_in_order() -> None:
    cards = [nic(f"mlx5_{number}", "A") for number in range(4)]
    mapped = map_rails(cards, [gpu(0, "A"), gpu(1, "A")])
    assert [(entry.rail, entry.gpus) for entry in mapped] == [("0", (0,)), ("1", (0,)), ("2", (1,)), ("3", (1,))]


def test_a_gpu_takes_the_card_that_no_nearer_gpu_has() -> None:
    cards = [nic("mlx5_0", "A", "B"), nic("mlx5_1", "A", "C")]
    mapped = map_rails(cards, [gpu(0, "A"), gpu(1, "A", "B")])
    assert gpus(mapped) == {"mlx5_1": (0,), "mlx5_0": (1,)}
    assert rails(mapped) == {"mlx5_1": "0", "mlx5_0": "1"}


def test_a_missing_card_does_not_renumber_the_others(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path)
    (tmp_path / "class/infiniband/mlx5_4").unlink()
    whole = {f"mlx5_{number}": str(rail) for rail, number in enumerate(DGX_H100_NICS) if number != 4}
    assert rails(machine_map(machine)) == whole


def test_a_missing_card_does_not_renumber_those_that_gpus_share(tmp_path: Path) -> None:
    mapped = machine_map(p4d(tmp_path, missing=frozenset({1})))
    assert rails(mapped) == {"rdmap16s27": "0", "rdmap144s27": "2", "rdmap160s27": "3"}


def test_the_only_card_of_a_large_machine_is_rail_0() -> None:
    assert rails(map_rails([nic("mlx5_0", "D")], [gpu(number, "ABCD"[number]) for number in range(4)])) == {
        "mlx5_0": "0"
    }


# What people say.


def test_the_configuration_decides_which_are_rails_and_their_numbers(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path)
    mapped = machine_map(machine, configured="mlx5_1=0 mlx5_0 mlx5_3=7", hca="=mlx5_4:1:5")
    assert rails(mapped) == {"mlx5_1": "0", "mlx5_0": "1", "mlx5_3": "7"}
    assert reason(mapped, "mlx5_1").startswith("configured: mlx5_1=0; ")
    assert reason(mapped, "mlx5_0").startswith("configured: mlx5_0; PIX to GPU 0")
    assert reason(mapped, "mlx5_4") == "matches no configured rail"
    assert gpus(mapped) == {"mlx5_1": (), "mlx5_0": (0,), "mlx5_3": (1,)}


def test_the_configuration_may_name_a_port(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.rdma("mlx4_0", "pci0000:00/0000:00:01.0/0000:01:00.0", ports=2)
    assert rails(machine_map(machine, configured="mlx4_0:2=3")) == {"mlx4_0:2": "3"}


def test_configured_patterns_keep_the_gpus_order(tmp_path: Path) -> None:
    mapped = machine_map(dgx_h100(tmp_path), configured="mlx5_1?")
    assert rails(mapped) == {"mlx5_10": "0", "mlx5_11": "1"}


def test_nccl_ib_hca_gives_rail_and_plane(tmp_path: Path) -> None:
    mapped = machine_map(dgx_h100(tmp_path), hca="=mlx5_0:1:4:1,mlx5_3:1:5,mlx5_4,mlx5_1:1:6")
    assert rails(mapped) == {
        "mlx5_0": "4",
        "mlx5_3": "5",
        "mlx5_1": "6",
        "mlx5_4": "2",
        "mlx5_5": "3",
        "mlx5_6": "0",
        "mlx5_9": "1",
        "mlx5_10": "8",
        "mlx5_11": "7",
    }
    assert [entry.plane for entry in mapped if entry.nic.device == "mlx5_0"] == [1]
    assert reason(mapped, "mlx5_0") == "NCCL_IB_HCA gives it rail 4; PIX to GPU 0, by PCI switch 0000:16:00.0"


def carrying(mapped: Sequence[MappedNic]) -> set[str]:
    return {entry.nic.device for entry in mapped if entry.rail is not None and entry.carries}


@pytest.mark.parametrize(
    ("hca", "used"),
    [
        ("=mlx5_9,mlx5_10", {"mlx5_9", "mlx5_10"}),
        ("^mlx5_0", {f"mlx5_{number}" for number in DGX_H100_NICS if number}),
        ("=mlx5_0 =mlx5_3", {"mlx5_0", "mlx5_3"}),
    ],
)
def test_a_job_chooses_among_the_rails_and_takes_none_and_does_not_renumber_them(
    tmp_path: Path, hca: str, used: set[str]
) -> None:
    machine = dgx_h100(tmp_path)
    mapped = machine_map(machine, hca=hca)
    assert rails(mapped) == rails(machine_map(machine))
    assert not any(entry.requested for entry in mapped)
    assert carrying(mapped) == used


def test_a_job_that_may_use_all_leaves_storage_out(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path)
    assert rails(machine_map(machine, hca="mlx5")) == rails(machine_map(machine))


def test_a_job_on_storage_cards_alone_makes_them_rails_after_the_others(tmp_path: Path) -> None:
    mapped = machine_map(dgx_h100(tmp_path), hca="=mlx5_1,mlx5_7")
    own = {f"mlx5_{number}": str(rail) for rail, number in enumerate(DGX_H100_NICS)}
    assert rails(mapped) == {**own, "mlx5_1": "8", "mlx5_7": "10"}
    assert carrying(mapped) == {"mlx5_1", "mlx5_7"}
    assert {entry.nic.device for entry in mapped if entry.requested} == {"mlx5_1", "mlx5_7"}


def test_two_planes_share_a_rail() -> None:
    cards = [nic("mlx5_0", "A"), nic("mlx5_1", "A"), nic("mlx5_2", "B")]
    mapped = map_rails(
        cards, [gpu(0, "A"), gpu(1, "B")], hca_lists=[parse_hca_list("mlx5_0:1:0:0,mlx5_1:1:0:1,mlx5_2:1:1")]
    )
    assert [(entry.rail, entry.plane) for entry in mapped] == [("0", 0), ("0", 1), ("1", None)]


XML_NET = '<pci busid="{}" class="0x0207"><nic><net name="{}" port="1" rail="{}" plane="0"/></nic></pci>'


def test_the_topology_file_gives_rails_after_nccl_ib_hca(tmp_path: Path) -> None:
    nets = XML_NET.format("0000:18:00.0", "mlx5_0", 3) + XML_NET.format("0000:40:00.0", "mlx5_3", 2)
    xml = f'<system version="1"><cpu numaid="0">{nets}</cpu></system>'
    mapped = machine_map(two_sockets(tmp_path / "a"), xml=xml, hca="mlx5_0:1:7,mlx5")
    assert rails(mapped) == {"mlx5_0": "7", "mlx5_1": "1", "mlx5_2": "0", "mlx5_3": "2"}
    assert "rail=2" in reason(mapped, "mlx5_3")


def test_a_port_that_the_topology_file_gives_a_rail_is_one_though_others_are_nearer(tmp_path: Path) -> None:
    xml = f'<system version="1"><cpu numaid="0">{XML_NET.format("0000:29:00.0", "mlx5_1", 9)}</cpu></system>'
    machine = dgx_h100(tmp_path)
    assert rails(machine_map(machine, xml=xml))["mlx5_1"] == "9"
    assert "mlx5_1" not in rails(machine_map(machine, xml=xml, hca="^=mlx5_1"))


def test_the_topology_file_s_places_count_before_the_machine_s() -> None:
    # A virtual machine: all on one bus, no nodes.
    flat = [Nic(f"mlx5_{number}", 1, Place(f"0101:00:0{number}.0", (), None)) for number in (0, 1)]
    cards = [Gpu(number, Place(f"0001:00:0{number}.0", (), None)) for number in (0, 1)]
    xml = "".join(
        f'<pci busid="ffff:ff:0{at}.0"><pci busid="0101:00:0{1 - at}.0"/><pci busid="0001:00:0{at}.0"/></pci>'
        for at in (0, 1)
    )
    topology = parse_topology(f'<system version="1"><cpu numaid="0">{xml}</cpu></system>'.encode())
    assert gpus(map_rails(flat, cards)) == {"mlx5_0": (), "mlx5_1": ()}
    mapped = map_rails(flat, cards, topology=topology)
    assert gpus(mapped) == {"mlx5_1": (0,), "mlx5_0": (1,)}
    assert reason(mapped, "mlx5_1") == "PIX to GPU 0, by PCI switch ffff:ff:00.0 (NCCL topology file)"


def test_a_number_that_is_taken_is_not_given_again(tmp_path: Path) -> None:
    mapped = machine_map(without_gpus(tmp_path, 4), hca="mlx5_3:1:0,mlx5")
    assert rails(mapped) == {"mlx5_3": "0", "mlx5_1": "1", "mlx5_2": "2", "mlx5_0": "3"}


# Properties.

switches = st.lists(st.sampled_from("ABC"), max_size=3).map(tuple)
places = st.builds(
    Place, st.integers(0, 255).map(lambda bus: f"0000:{bus:02x}:00.0"), switches, st.sampled_from([None, 0, 1])
)
nics = st.lists(
    st.builds(
        Nic,
        st.integers(0, 12).map(lambda number: f"mlx5_{number}"),
        st.sampled_from([None, 1, 2]),
        places,
        st.sampled_from([None, 1, 25 * GIGABIT, 100 * GIGABIT, 400 * GIGABIT]),
        st.sampled_from([None, True, False]),
    ),
    max_size=10,
    unique_by=lambda nic: (nic.device, nic.port),
)
machines_gpus = st.lists(places, max_size=8).map(lambda found: [Gpu(index, place) for index, place in enumerate(found)])
values = st.lists(
    st.one_of(
        st.sampled_from(["", "mlx5", "^mlx5_1", "=mlx5_0:1:3,mlx5_2", "mlx5_1::0:1"]),
        st.text("mlx5_01:^=,", max_size=12),
    ),
    max_size=3,
)


@settings(deadline=None)
@given(nics, machines_gpus, values, st.randoms(use_true_random=False))
def test_every_port_is_decided_once_with_a_reason_in_any_order(
    found: list[Nic], cards: list[Gpu], told: list[str], shuffle: random.Random
) -> None:
    lists = [parse_hca_list(value) for value in told]
    mapped = map_rails(found, cards, hca_lists=lists)
    assert sorted((entry.nic.device, str(entry.nic.port)) for entry in mapped) == sorted(
        (nic.device, str(nic.port)) for nic in found
    )
    for entry in mapped:
        assert entry.reason
        assert "\n" not in entry.reason
        assert bool(entry.gpus) is (entry.path is not None)
        assert entry.rail is None or entry.rail.isdigit()
    if not any(entry.rail is not None for hca_list in lists for entry in hca_list.entries):
        numbers = [entry.rail for entry in mapped if entry.rail is not None]
        assert len(set(numbers)) == len(numbers)
    if found and not told:
        assert any(entry.rail is not None for entry in mapped)
    shuffle.shuffle(found)
    shuffle.shuffle(cards)
    assert map_rails(found, cards, hca_lists=lists) == mapped


@settings(deadline=None)
@given(nics, machines_gpus, st.data())
def test_what_was_a_rail_is_one_whatever_its_link_does(found: list[Nic], cards: list[Gpu], data: st.DataObject) -> None:
    before = {(entry.nic.device, entry.nic.port) for entry in map_rails(found, cards) if entry.rail is not None}
    speeds = st.sampled_from([None, 1, 400 * GIGABIT])
    changed = [Nic(n.device, n.port, n.place, data.draw(speeds), data.draw(st.booleans())) for n in found]
    after = {
        (entry.nic.device, entry.nic.port)
        for entry in map_rails(changed, cards, known=before)
        if entry.rail is not None
    }
    assert before <= after


def test_a_tree_without_links_still_has_rails(tmp_path: Path) -> None:
    """A recorded tree in which every link has become a folder knows nothing of bridges."""
    machine = SimulatedMachine(tmp_path / "live")
    machine.rdma("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0")
    recorded = tmp_path / "recorded/class/infiniband/mlx5_0"
    shutil.copytree(tmp_path / "live/class/infiniband/mlx5_0/ports", recorded / "ports")
    assert rails(machine_map(SimulatedMachine(tmp_path / "recorded"))) == {"mlx5_0": "0"}
