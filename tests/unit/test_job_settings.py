"""What jobs say of the machine's ports and topology, and what of it is believed while several tenants run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.rails.job_settings import JobSettings, TopologyFiles, believe, sockets_only
from railscope.agent.node.rails.rdma_rails import RdmaRails
from railscope.agent.node.targets.processes import NOT_DESCRIBED, Description
from railscope.probes.clock import SystemClock
from railscope.probes.topology.machine import Gpu, Nic
from railscope.probes.topology.nccl_xml import XmlTopology, parse_topology
from railscope.probes.topology.paths import Place
from railscope.probes.topology.pci import pci_devices
from tests.trees.rdma import MLX5_COUNTERS, RdmaTree
from tests.unit.growth import lines_run
from tests.waiting import eventually

ADA, EVE = Tenant(1000), Tenant(5000)


def file(address: str, name: str = "mlx5_0", rail: int = 5) -> XmlTopology:
    net = f'<nic><net name="{name}" port="1" rail="{rail}"/></nic>'
    return parse_topology(
        f'<system version="1"><cpu numaid="0"><pci busid="{address}" class="0x0207">{net}</pci></cpu></system>'.encode()
    )


CARD = Nic("mlx5_0", 1, Place("0000:18:00.0", (), 0))
FILES = TopologyFiles()


def said(content: XmlTopology, tenant: Tenant = ADA) -> JobSettings:
    file = FILES.file_with(content, tenant)
    assert file is not None
    return JobSettings("", False, tenant, file)


TRUE, OTHER = file("0000:18:00.0"), file("0000:18:00.0", rail=6)


def test_a_topology_file_holds_while_every_tenant_that_runs_has_it() -> None:
    ada, eve = said(TRUE), said(OTHER, EVE)
    silent = JobSettings("", False, EVE)
    helper = JobSettings("", False, ADA)
    assert believe([ada, helper]).topology([CARD], []) == TRUE
    assert believe([ada, eve]).topology([CARD], []) is None, "they disagree"
    assert believe([ada, silent]).topology([CARD], []) is None, "the other has none"
    assert believe([ada, said(file("0000:18:00.0"), EVE)]).topology([CARD], []) == TRUE
    assert believe([ada, said(OTHER)]).topology([CARD], []) is None
    assert believe([]).topology([CARD], []) is None


@pytest.mark.parametrize(
    ("content", "gpus"),
    [
        (file("0000:19:00.0"), []),
        (
            parse_topology(
                b'<system version="1"><cpu numaid="0"><pci busid="0000:77:00.0" class="0x0302"/></cpu></system>'
            ),
            [Gpu(0, Place("0000:66:00.0", (), 0))],
        ),
    ],
)
def test_a_topology_file_of_another_machine_is_not_believed(content: XmlTopology, gpus: list[Gpu]) -> None:
    assert believe([said(content)]).topology([CARD], gpus) is None


def test_a_topology_file_is_kept_once_while_a_process_has_it_and_a_tenant_has_two_at_most() -> None:
    files = TopologyFiles()
    contents = [file("0000:18:00.0", rail=rail) for rail in range(9)]
    kept = [files.file_with(content, ADA) for content in contents]
    assert [one is not None for one in kept] == [True, True, *[False] * 7]
    assert files.file_with(file("0000:18:00.0", rail=0), EVE) is kept[0], "of the same content there is one"
    others = [files.file_with(content, Tenant(5000 + number)) for number, content in enumerate(contents[2:])]
    assert [one is not None for one in others] == [*[True] * 6, False]
    del kept, others
    assert files.file_with(contents[8], ADA) is not None, "nobody has the others any more"


def test_numbers_in_nccl_ib_hca_hold_while_no_other_tenant_says_otherwise() -> None:
    ranks = [JobSettings(f"=mlx5_{rank}:1:{rank + 4}", False, ADA) for rank in range(2)]
    eve = JobSettings("mlx5_0:1:9", False, EVE)
    assert {one.text for one in believe(ranks).numbered_by} == {"=mlx5_0:1:4", "=mlx5_1:1:5"}
    assert believe([*ranks, eve]).numbered_by == ()
    assert len(believe([*ranks, eve]).hca_lists) == 3
    without_rdma = JobSettings("", True, EVE)
    assert len(believe([*ranks, without_rdma]).numbered_by) == 2, "it uses no port"


def test_a_tenant_adds_a_bounded_number_of_lists_and_crowds_out_nobody() -> None:
    many = [JobSettings(f"mlx5_{number}", False, EVE) for number in range(1000)]
    lists = believe([*many, JobSettings("=mlx5_7", False, ADA)]).hca_lists
    assert len(lists) == 17
    assert "=mlx5_7" in {one.text for one in lists}


@pytest.mark.parametrize(
    ("ib_disable", "net", "expected"),
    [("", "", False), ("0", "IB", False), ("1", "", True), ("", "socket", True), ("", "Socket", True)],
)
def test_what_keeps_a_process_off_rdma(ib_disable: str, net: str, expected: bool) -> None:
    assert sockets_only(ib_disable, net) is expected


class OwnTime(SystemClock):
    now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns


def description(**settings: str) -> Description:
    return Description(settings=tuple(settings.items()))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    tree = RdmaTree(tmp_path / "sys")
    for number in range(3):
        tree.port(tree.device(f"mlx5_{number}", pci=f"0000:{18 + number}:00.0"), counters=MLX5_COUNTERS)
    return tmp_path / "sys"


def test_a_tick_takes_as_long_whatever_a_topology_file_holds(machine: Path) -> None:
    def lines_of_a_tick(functions: int) -> int:
        cards = "".join(f'<pci busid="0000:{number:02x}:00.0"/>' for number in range(functions))
        content = parse_topology(f'<system version="1"><cpu numaid="0">{cards}</cpu></system>'.encode())
        rails = RdmaRails(OwnTime(), sysfs=machine, sample_interval_ns=10**8, window_ns=10**9, patterns=())
        with closing(rails):
            rails.start()
            rails.add_process(1, Description(topology=content), ADA)
            rails.update()
            # The sampler has a thread of its own: what its first reading changes is no matter of the file's.
            eventually(lambda: not rails.unread_sources())
            return lines_run(rails.update)

    assert lines_of_a_tick(250) < lines_of_a_tick(1) + 250


def test_what_jobs_say_is_decided_about_without_reading_the_machine_again(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=pci_devices)
    monkeypatch.setattr("railscope.probes.topology.machine.pci_devices", read)
    rails = RdmaRails(OwnTime(), sysfs=machine, sample_interval_ns=10**8, window_ns=10**9, patterns=())
    with closing(rails):
        rails.start()
        for pid in range(1, 9):
            rails.add_process(pid, description(NCCL_IB_HCA=f"=mlx5_1:1:{pid}"), Tenant(pid))
            rails.update()
        assert {one.device: one.rail for one in rails.rails()} == {"mlx5_0": "0", "mlx5_1": "1", "mlx5_2": "2"}
    assert read.call_count == 1


def test_one_job_s_settings_take_no_port_from_others_and_expire_with_it(machine: Path) -> None:
    clock = OwnTime()
    rails = RdmaRails(clock, sysfs=machine, sample_interval_ns=10**8, window_ns=10**9, patterns=())

    def shown(after_ns: int = 0) -> dict[str, str]:
        clock.now_ns += after_ns
        rails.update()
        return {one.device: one.rail for one in rails.rails()}

    with closing(rails):
        rails.start()
        own = {"mlx5_0": "0", "mlx5_1": "1", "mlx5_2": "2"}
        assert shown() == own
        rails.add_process(1, description(NCCL_IB_HCA="=mlx5_1:1:7", NCCL_IB_DISABLE="0"), ADA)
        assert shown() == {"mlx5_0": "0", "mlx5_1": "7", "mlx5_2": "2"}, "alone, it numbers its own"
        rails.add_process(2, NOT_DESCRIBED, EVE)
        rails.add_process(2, description(NCCL_IB_DISABLE="1"), EVE)
        assert rails.carries_collectives
        assert shown() == {"mlx5_0": "0", "mlx5_1": "7", "mlx5_2": "2"}
        rails.add_process(3, description(NCCL_IB_HCA="mlx5_1:1:1,mlx5_0:1:2"), EVE)
        assert shown() == own, "they disagree"
        rails.remove_process(3)
        assert shown() == own
        assert shown(400_000_000) == {"mlx5_0": "0", "mlx5_1": "7", "mlx5_2": "2"}
        rails.remove_process(1)
        assert shown(400_000_000) == own
        assert not rails.carries_collectives, "the one that runs uses sockets"
