"""NCCL's topology files: what is understood, what is refused, and that nothing else can happen."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.topology.machine import described_places, find_described_place, gpus_of_topology, nics_of_topology
from railscope.probes.topology.nccl_xml import (
    DEEPEST,
    MOST_BYTES,
    MOST_ELEMENTS,
    MOST_NODES,
    TopologyError,
    XmlTopology,
    parse_topology,
    read_topology,
)
from railscope.probes.topology.paths import Place

AZURE = Path(__file__).parents[3] / "shared/data/azure-ndv4-topo.xml"
"""A sample of Azure's (azhpc-images, MIT), kept beside the checkout."""

DUMP = b"""<!-- simulated, in the form that NCCL_TOPO_DUMP_FILE has -->
<system version="1">
  <cpu host_hash="0x1" numaid="1" affinity="0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:16:00.0" class="0x060400" vendor="0x1000" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:1B:00.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="3" sm="90" rank="3" gdr="1"><nvlink target="0000:05:00.0" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:18:00.0" class="0x020700" vendor="0x15b3" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" latency="0.0" speed="400000" port="1" guid="0x1" gdr="1" rail="2" plane="1"/>
          <net name="mlx5_0" dev="1" speed="-1" port="2" rail="-1"/>
        </nic>
      </pci>
    </pci>
    <nic><net name="eth0" dev="2" speed="10000" port="0"/></nic>
  </cpu>
</system>
"""


def system(inside: str) -> bytes:
    return f'<system version="1"><cpu numaid="0">{inside}</cpu></system>'.encode()


def test_a_dump_gives_functions_gpus_and_ports() -> None:
    topology = parse_topology(DUMP)
    switch, gpu, card = topology.functions
    assert gpu.place == Place("0000:1b:00.0", ("0000:16:00.0",), 1)
    assert (gpu.is_gpu, gpu.is_network, gpu.gpus, gpu.class_code) == (True, False, (3,), 0x030200)
    assert (card.is_gpu, card.is_network) == (False, True)
    assert not switch.is_gpu
    assert not switch.is_network
    first, second, virtual = topology.nets
    assert (first.name, first.port, first.rail, first.plane) == ("mlx5_0", 1, 2, 1)
    assert first.speed_bytes_per_second == 50_000_000_000
    assert first.place == Place("0000:18:00.0", ("0000:16:00.0",), 1)
    # NCCL writes -1 where it does not know.
    assert (second.port, second.rail, second.speed_bytes_per_second) == (2, None, None)
    assert (virtual.name, virtual.port, virtual.place) == ("eth0", None, Place("", (), 1))


def test_gpus_have_the_numbers_of_the_file_if_it_numbers_all() -> None:
    function = '<pci busid="0000:0{}:00.0" class="0x030200">{}</pci>'
    numbered = system(function.format(1, '<gpu dev="5"/>') + function.format(2, '<gpu dev="4"/>'))
    assert [gpu.index for gpu in gpus_of_topology(parse_topology(numbered))] == [4, 5]
    half = system(function.format(1, '<gpu dev="5"/>') + function.format(2, ""))
    assert [gpu.index for gpu in gpus_of_topology(parse_topology(half))] == [0, 1]


def test_ports_that_nccl_merged_stand_for_themselves() -> None:
    nets = '<net name="mlx5_0+mlx5_1" dev="0" speed="800000"/>'
    nics = nics_of_topology(parse_topology(system(f'<pci busid="0000:01:00.0"><nic>{nets}</nic></pci>')))
    assert [(nic.device, nic.speed_bytes_per_second) for nic in nics] == [
        ("mlx5_0", 50_000_000_000),
        ("mlx5_1", 50_000_000_000),
    ]
    alone = f'{nets}<net name="mlx5_1" port="1"/><net name="mlx5_0" port="1"/>'
    nics = nics_of_topology(parse_topology(system(f'<pci busid="0000:01:00.0"><nic>{alone}</nic></pci>')))
    assert [(nic.device, nic.port) for nic in nics] == [("mlx5_1", 1), ("mlx5_0", 1)]


def test_elements_that_nccl_ignores_are_ignored_with_what_they_hold() -> None:
    text = '<strange><pci busid="0000:01:00.0"/></strange><net name="a"/><gpu dev="0"/>'
    assert parse_topology(system(text)) == XmlTopology((), ())


def test_an_address_that_occurs_twice_counts_where_it_came_first() -> None:
    twice = '<pci busid="0000:01:00.0" class="0x060400"><pci busid="0000:02:00.0"/></pci><pci busid="0000:02:00.0"/>'
    topology = parse_topology(system(twice))
    assert [function.place.switches for function in topology.functions] == [(), ("0000:01:00.0",)]


def test_what_the_machine_has_hangs_below_a_switch_that_the_file_names() -> None:
    known = described_places(parse_topology(system('<pci busid="0000:45:00.0"><pci busid="0000:4e:00.0"/></pci>')))
    below = Place("0000:4f:00.0", ("0000:40:00.0", "0000:4e:00.0", "0000:50:00.0"), 7, "pci0000:40")
    assert find_described_place(below, known) == Place(
        "0000:4f:00.0", ("0000:45:00.0", "0000:4e:00.0", "0000:50:00.0"), 0
    )
    assert find_described_place(Place("0000:99:00.0", ("0000:98:00.0",), 1), known) is None
    assert find_described_place(below, {}) is None


def test_the_azure_file_names_eight_gpus_and_eight_cards() -> None:
    if not AZURE.exists():
        pytest.skip(f"{AZURE} is absent")
    topology = read_topology(AZURE)
    assert len(gpus_of_topology(topology)) == len(nics_of_topology(topology)) == 8
    assert {function.place.numa_node for function in topology.functions} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not well-formed"),
        (b"<system", "not well-formed"),
        (b"<html/>", "no <system>"),
        (b'<x><system version="1"/></x>', "no <system>"),
        (b'<system version="3"/>', "version '3'"),
        (b"<system/>", "version ''"),
        (b'<system version="1"/><system version="1"/>', "not well-formed"),
        (system('<pci busid="x"/>'), "busid is not a PCI address: 'x'"),
        (system("<pci/>"), "busid is not a PCI address"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><system version="1"/>', "document type"),
        (b'<!DOCTYPE system SYSTEM "file:///etc/passwd"><system version="1"/>', "document type"),
        (b'<system version="1">&b;</system>', "not well-formed"),
        (b" " * (MOST_BYTES + 1), "larger than 4 MiB"),
        (system("<a/>" * MOST_ELEMENTS), f"more than {MOST_ELEMENTS} elements"),
        (system("<a>" * DEEPEST), "deeper"),
        (system(f'<a b="{"c" * 2000}"/>'), "too long attributes"),
        (system("<a " + " ".join(f'a{n}=""' for n in range(65)) + "/>"), "too many"),
        (
            system("<nic>" + "".join(f'<net name="n{n}"/>' for n in range(MOST_NODES + 1)) + "</nic>"),
            "577 network ports",
        ),
    ],
)
def test_a_file_that_is_no_topology_is_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(TopologyError) as refusal:
        parse_topology(data)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_entities_are_refused_before_they_grow() -> None:
    levels = "".join(f'<!ENTITY e{n} "' + f"&e{n - 1};" * 10 + '">' for n in range(1, 30))
    data = f'<!DOCTYPE s [<!ENTITY e0 "x">{levels}]><system version="1">&e29;</system>'.encode()
    with pytest.raises(TopologyError, match="document type"):
        parse_topology(data)


def test_a_pipe_and_a_folder_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TopologyError, match="regular file"):
        read_topology(tmp_path / "pipe")
    with pytest.raises(OSError, match="directory"):
        read_topology(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_topology(tmp_path / "absent")


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_understood_or_refused(data: bytes) -> None:
    with contextlib.suppress(TopologyError):
        parse_topology(data)


attributes = st.dictionaries(
    st.sampled_from(["busid", "class", "dev", "name", "port", "speed", "rail", "plane", "numaid"]),
    st.one_of(
        st.sampled_from(
            ["0000:01:00.0", "0000:02:00.0", "0x030200", "0x02", "1", "-1", "99999999999999999999", "a+b", "+"]
        ),
        st.text(
            alphabet=st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="<>&\"'"), max_size=20
        ),
    ),
)
elements = st.recursive(
    st.just(""),
    lambda inside: st.lists(
        st.tuples(st.sampled_from(["cpu", "pci", "gpu", "nic", "net", "x"]), attributes, inside), max_size=4
    ).map(
        lambda made: "".join(
            "<" + name + "".join(f' {key}="{value}"' for key, value in chosen.items()) + f">{text}</{name}>"
            for name, chosen, text in made
        )
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(elements)
def test_any_well_formed_file_is_understood_or_refused_and_gives_sound_facts(text: str) -> None:
    try:
        topology = parse_topology(f'<system version="1">{text}</system>'.encode())
    except TopologyError:
        return
    known = {function.place.address for function in topology.functions}
    assert len(known) == len(topology.functions)
    for function in topology.functions:
        assert set(function.place.switches) <= known
    for net in topology.nets:
        assert net.name.isprintable()
        assert net.rail is None or 0 <= net.rail < 32768
        assert net.port is None or 1 <= net.port <= 255
        assert net.speed_bytes_per_second is None or net.speed_bytes_per_second > 0
    assert len({gpu.index for gpu in gpus_of_topology(topology)}) == len(gpus_of_topology(topology))
    nics_of_topology(topology)
