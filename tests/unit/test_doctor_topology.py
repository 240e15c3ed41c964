"""The picture of GPUs, ports and rails, of simulated hosts and of files; its JSON; what a bad file says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.cli import config as config_command
from railscope.agent.cli.main import main
from railscope.agent.config.options import Config
from railscope.agent.config.rail_patterns import parse_rail_pattern
from railscope.agent.doctor.command import Examination, as_json_text, as_text
from railscope.agent.doctor.findings import RailReport
from railscope.agent.doctor.rails import check_rails
from railscope.agent.doctor.topology import (
    WIDTH,
    PortReport,
    TopologyReport,
    check_topology,
    make_report,
    render_picture,
    topologies_of_file,
)
from railscope.agent.node.rails.gpu_affinity import map_rails
from railscope.probes.clock import SystemClock
from tests.trees import rdma
from tests.trees.pci import SimulatedMachine, behind_switch, dgx_h100, p4d, p5, without_gpus, workstation
from tests.unit.test_topology_shapes import SHAPES

FUNCTION = '<pci busid="{}" class="{}"/>'
P4D_FILE = '<system version="1"><cpu numaid="0">{}</cpu></system>'.format(
    "".join(
        f'<pci busid="ffff:ff:0{number}.0" class="0x060400">'
        + "".join(
            FUNCTION.format(f"0000:{number}0:1{slot}.0", code)
            for slot, code in (("b", "0x020000"), ("c", "0x030200"), ("d", "0x030200"))
        )
        + "</pci>"
        for number in (1, 2)
    )
)

RAIL_FILE = (
    '<system version="1"><cpu numaid="0"><pci busid="0000:40:00.0"><nic><net name="mlx5_3" rail="{}"/></nic></pci>'
    "</cpu></system>"
)


def drawn(machine: SimulatedMachine) -> list[str]:
    gpus = machine.gpus()
    return render_picture(make_report(gpus, map_rails(machine.nics(), gpus))).splitlines()


def procfs(tmp_path: Path, pid: int, **environment: str) -> Path:
    folder = tmp_path / "proc" / str(pid)
    folder.mkdir(parents=True)
    text = "".join(f"{name}={value}\0" for name, value in environment.items())
    (folder / "environ").write_text(text)
    return tmp_path / "proc"


def test_dgx_h100_is_eight_lines_and_its_storage(tmp_path: Path) -> None:
    lines = drawn(dgx_h100(tmp_path))
    assert lines[0] == "GPU 0 ─── PIX mlx5_0:1   400 Gb/s  rail 0"
    assert lines[7] == "GPU 7 ─── PIX mlx5_11:1  400 Gb/s  rail 7"
    assert lines[8].startswith("no rail: mlx5_1:1, mlx5_2:1: no GPU shares a PCI switch")


def test_gpus_that_share_a_card_are_joined(tmp_path: Path) -> None:
    assert drawn(p4d(tmp_path))[:3] == [
        "GPU 0 ─┬─ PIX rdmap16s27:1   100 Gb/s  rail 0",
        "GPU 1 ─┘",
        "GPU 2 ─┬─ PIX rdmap32s27:1   100 Gb/s  rail 1",
    ]


def test_cards_that_share_a_gpu_are_joined(tmp_path: Path) -> None:
    assert drawn(p5(tmp_path))[:5] == [
        "GPU 0 ─┬─ PIX rdmap80s0:1  100 Gb/s  rail 0",
        "       ├─ PIX rdmap81s0:1  100 Gb/s  rail 1",
        "       ├─ PIX rdmap82s0:1  100 Gb/s  rail 2",
        "       └─ PIX rdmap83s0:1  100 Gb/s  rail 3",
        "GPU 1 ─┬─ PIX rdmap96s0:1  100 Gb/s  rail 4",
    ]


def test_a_gpu_without_a_card_is_said(tmp_path: Path) -> None:
    lines = drawn(p4d(tmp_path, missing=frozenset({2})))
    assert lines[-1] == "GPU 4, 5: no port of its own, sends through another GPU's or the CPU"


def test_a_machine_without_gpus_shows_its_rails(tmp_path: Path) -> None:
    assert drawn(without_gpus(tmp_path, 2)) == [
        "no GPU      mlx5_0:1  400 Gb/s  rail 0",
        "no GPU      mlx5_1:1  400 Gb/s  rail 1",
    ]


names = st.one_of(st.just("mlx5_0"), st.text(max_size=80))
ports = st.builds(
    PortReport,
    st.one_of(st.none(), st.integers(0, 32767).map(str), names),
    st.one_of(st.none(), st.integers(0, 32767)),
    names,
    st.one_of(st.none(), st.integers(1, 255)),
    st.just("0000:18:00.0"),
    st.lists(st.integers(0, 32767), max_size=5).map(tuple),
    st.one_of(st.none(), st.sampled_from(["LOC", "PIX", "PXB", "PHB"])),
    st.one_of(st.none(), st.integers(1, 2**57)),
    st.text(max_size=300),
)
reports = st.builds(
    TopologyReport, st.lists(st.integers(0, 32767), max_size=20).map(tuple), st.lists(ports, max_size=6).map(tuple)
)


@settings(deadline=None)
@given(reports)
def test_no_line_is_wider_than_100_columns_or_can_move_a_terminal(found: TopologyReport) -> None:
    for line in render_picture(found).split("\n"):
        assert len(line) <= WIDTH
        assert line.isprintable()


def test_the_command_draws_the_machine_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "topology.xml"
    file.write_text(P4D_FILE)
    assert main(["doctor", "--topology", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "GPU 0 ─┬─ PIX 0000:10:1b.0    rail 0",
        "GPU 1 ─┘",
        "GPU 2 ─┬─ PIX 0000:20:1b.0    rail 1",
        "GPU 3 ─┘",
        f"{file}: 4 GPUs, 2 ports, 2 rails",
    ]


def test_the_command_gives_json_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "topology.xml"
    file.write_text(P4D_FILE)
    assert main(["doctor", "--json", "--topology", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(port["rail"], port["device"], port["port"], port["gpus"]) for port in found["rails"]] == [
        ("0", "0000:10:1b.0", None, [0, 1]),
        ("1", "0000:20:1b.0", None, [2, 3]),
    ]
    assert found["rails"][0]["reason"] == "PIX to GPUs 0 and 1, by PCI switch ffff:ff:01.0 (NCCL topology file)"


def test_configured_rails_hold_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "topology.xml"
    file.write_text(P4D_FILE)
    assert main(["doctor", "--topology", str(file), "--rail.devices", "0000:20:1b.0=7"]) == 0
    assert "rail 7" in capsys.readouterr().out


def test_the_services_settings_are_of_this_host_and_not_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, file = tmp_path / "railscope.yml", tmp_path / "topology.xml"
    served.write_text("rails: {devices: ['0000:20:1b.0=7'], no_such_key: 1}\n")
    file.write_text(P4D_FILE)
    monkeypatch.setattr(config_command, "SERVICE_FILE", served)
    assert main(["doctor", "--topology", str(file)]) == 0
    assert "rail 7" not in capsys.readouterr().out
    for words in ([], ["--topology"]):
        assert main(["doctor", *words]) == 2
        assert f"{served}: line 1: rails.no_such_key is no key" in capsys.readouterr().err


def test_a_file_without_cards_is_a_problem_that_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "topology.xml"
    file.write_text('<system version="1"><cpu numaid="0"><pci busid="0000:00:16.0"/></cpu></system>')
    assert main(["doctor", "--topology", str(file)]) == 1
    assert "0 rails; where it names no card" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "<system", '<!DOCTYPE a><system version="1"/>', "\0"])
def test_a_bad_file_is_one_line_and_status_2(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "topology.xml"
    if content is not None:
        file.write_text(content)
    assert main(["doctor", "--topology", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"railscope doctor: --topology: {file}")
    assert "NCCL_TOPO_DUMP_FILE" in line


def test_a_host_s_picture_follows_the_findings_and_its_map_is_in_the_json(tmp_path: Path) -> None:
    found = check_topology(Config(sysfs=dgx_h100(tmp_path).sysfs), (), ())[1]
    assert found is not None
    examination = Examination("0.1.0", "6.12.0", (), (), (), found)
    assert "GPU 6 ─── PIX mlx5_10:1  400 Gb/s  rail 6\n" in as_text(examination)
    assert as_text(examination).splitlines()[-2] == ""
    assert json.loads(as_json_text(examination))["topology"] == json.loads(json.dumps(asdict(found)))


def test_a_host_without_gpus_and_rdma_has_no_picture(tmp_path: Path) -> None:
    assert check_topology(Config(sysfs=tmp_path), (), ()) == ([], None)


def test_jobs_settings_are_asked_for(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path / "sys")
    proc = procfs(tmp_path, 7, NCCL_IB_HCA="=mlx5_0:1:5,mlx5_3", NCCL_TOPO_FILE="/etc/topology.xml")
    file = proc / "7/root/etc/topology.xml"
    file.parent.mkdir(parents=True)
    file.write_text(RAIL_FILE.format(4))
    findings, found = check_topology(Config(sysfs=machine.sysfs, procfs=proc), [7], ())
    assert found is not None
    assert {port.device: port.rail for port in found.rails if port.rail} == {
        "mlx5_0": "5",
        "mlx5_3": "4",
        "mlx5_4": "2",
        "mlx5_5": "3",
        "mlx5_6": "0",
        "mlx5_9": "1",
        "mlx5_10": "6",
        "mlx5_11": "7",
    }
    assert [finding.status for finding in findings] == ["ok"]


def test_a_job_s_bad_topology_file_is_a_note_and_the_machine_s_tree_serves(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path / "sys")
    proc = procfs(tmp_path, 7, NCCL_TOPO_FILE="/absent.xml")
    findings, found = check_topology(Config(sysfs=machine.sysfs, procfs=proc), [7], ())
    assert found is not None
    assert sum(port.rail is not None for port in found.rails) == 8
    assert [finding.status for finding in findings] == ["note", "ok"]
    assert findings[0].what.startswith("topology file /absent.xml of process 7 is not used: ")


def test_topology_files_that_disagree_describe_nothing_and_one_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path / "sys")
    for pid, content in ((7, "garbage"), (8, RAIL_FILE.format(4)), (9, RAIL_FILE.format(5))):
        proc = procfs(tmp_path, pid, NCCL_TOPO_FILE=f"/{pid}.xml")
        (proc / f"{pid}/root").mkdir()
        (proc / f"{pid}/root/{pid}.xml").write_text(content)
    findings, found = check_topology(Config(sysfs=machine.sysfs, procfs=proc), [9, 8, 7], ())
    assert found is not None
    assert [port.rail for port in found.rails if port.device == "mlx5_3"] == ["1"], "as without a file"
    assert [finding.status for finding in findings] == ["note", "ok"]


@pytest.mark.parametrize("place", ["root/run", "root/var/run", "cwd"])
def test_the_file_is_where_nccl_looks_for_it(tmp_path: Path, place: str) -> None:
    machine = dgx_h100(tmp_path / "sys")
    proc = procfs(tmp_path, 7, **({"NCCL_TOPO_FILE": "own.xml"} if place == "cwd" else {}))
    name = "own.xml" if place == "cwd" else "nvidia-topologyd/virtualTopology.xml"
    file = proc / "7" / place / name
    file.parent.mkdir(parents=True)
    file.write_text(RAIL_FILE.format(11))
    _findings, found = check_topology(Config(sysfs=machine.sysfs, procfs=proc), [7], ())
    assert found is not None
    assert [port.rail for port in found.rails if port.device == "mlx5_3"] == ["11"]


def test_without_rdma_the_network_rails_are_shown_with_their_numbers(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.gpu(behind_switch(0x16, 4, "0000:1b:00.0"), 0)
    function = machine.function(behind_switch(0x16, 0, "0000:18:00.0"), "0x020000", "0x15b3", 0)
    (tmp_path / "class/net/eth2").mkdir(parents=True)
    (tmp_path / "class/net/eth2/device").symlink_to(function)
    rails = [
        RailReport(1, True, "eth2", "4", "NCCL's own choice", "physical", True, True, 12_500_000_000),
        RailReport(1, True, "lo", None, "not chosen", "loopback", True, True, None),
        RailReport(2, False, "eth9", "0", "in a container", "veth", True, True, None),
    ]
    findings, found = check_topology(Config(sysfs=tmp_path), (), rails)
    assert found is not None
    (port,) = found.rails
    assert (port.rail, port.device, port.port, port.gpus, port.path) == ("4", "eth2", None, (0,), "PIX")
    assert port.reason == "NCCL's own choice; PIX to GPU 0, by PCI switch 0000:16:00.0"
    assert [finding.what for finding in findings] == ["1 rail for 1 GPU"]


def test_a_file_can_be_asked_for_without_a_command(tmp_path: Path) -> None:
    file = tmp_path / "topology.xml"
    file.write_text(P4D_FILE)
    assert topologies_of_file(file, ())[0].gpus == (0, 1, 2, 3)


def test_a_workstation_has_one_line(tmp_path: Path) -> None:
    assert drawn(workstation(tmp_path)) == ["GPU 0 ─── PHB mlx5_0:1  100 Gb/s  rail 0"]


def test_network_devices_beside_rdma_rails_have_the_numbers_that_the_agent_gives_them(tmp_path: Path) -> None:
    rdma.mlx5_roce_8rails(tmp_path)
    _findings, reports = check_rails(Config(sysfs=tmp_path), (), SystemClock())
    numbers = {report.device: report.rail for report in reports}
    assert (numbers["ens24np0"], numbers["ens64np0"], numbers["ens220np0"], numbers["eth0"]) == ("0", "1", "7", None)
    assert [report.reason for report in reports if report.device == "eth0"] == [
        "of no RDMA port, and NCCL sends through those"
    ]


def test_a_host_whose_only_rails_are_rdma_ports_has_no_problem_with_its_rails(tmp_path: Path) -> None:
    rdma.efa(tmp_path)
    config = Config(sysfs=tmp_path, rails=(parse_rail_pattern("rdmap16s27"),))
    findings, reports = check_rails(config, (), SystemClock())
    assert [finding for finding in findings if finding.status == "problem"] == []
    assert reports == ()


def storage_beside(sysfs: Path) -> None:
    """Two nodes of two GPUs with an InfiniBand port each, and a card of two Ethernet ports for storage."""
    machine = SimulatedMachine(sysfs)
    for node in (0, 1):
        for at in (0, 1):
            bus = 0x10 + 0x40 * node + 8 * at
            machine.gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0", node)
            bus += 0x80
            path = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
            machine.rdma(f"mlx5_{4 * node + at}", path, node, link_layer="InfiniBand")
        bus = 0xA0 + 0x40 * node
        for function in (0, 1):
            path = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.{function}"
            machine.rdma(f"mlx5_{4 * node + 2 + function}", path, node, link_layer="Ethernet", gigabits=400)


def with_virtual_functions(sysfs: Path) -> None:
    """Two GPUs with a port each, and a virtual function of either."""
    machine = SimulatedMachine(sysfs)
    for number in (0, 1):
        bus = 0x10 + 0x10 * number
        machine.gpu(behind_switch(bus, 4, f"0000:{bus + 8:02x}:00.0"))
        path = behind_switch(bus, 0, f"0000:{bus + 4:02x}:00.0")
        machine.rdma(f"mlx5_{number}", path)
        machine.rdma(f"virt_{number}", path.removesuffix("0") + "1", physical_function=path.rpartition("/")[2])


PICTURES: dict[str, tuple[Callable[[Path], object], str]] = {
    "degraded": (
        rdma.degraded,
        """\
PROBLEM  rail:              1 is mlx5_1:1: 10 Gb/s, and its siblings run at 400 Gb/s
PROBLEM  rail:              2 is mlx5_2:1: 100 Gb/s on 1 lane, and its siblings run at 400 Gb/s on 4 lanes
GPU 0 ─── PHB mlx5_0:1  400 Gb/s  rail 0
GPU 1 ─── PHB mlx5_1:1   10 Gb/s  rail 1
GPU 2 ─── PHB mlx5_2:1  100 Gb/s  rail 2
GPU 3 ─── PHB mlx5_3:1  400 Gb/s  rail 3
""",
    ),
    "storage": (
        storage_beside,
        """\
GPU 0 ─── PHB mlx5_0:1  400 Gb/s  rail 0
GPU 1 ─── PHB mlx5_1:1  400 Gb/s  rail 1
GPU 2 ─── PHB mlx5_4:1  400 Gb/s  rail 2
GPU 3 ─── PHB mlx5_5:1  400 Gb/s  rail 3
no rail: mlx5_2:1, mlx5_3:1, mlx5_6:1, mlx5_7:1: Ethernet where the rails run InfiniBand: storage or
  management
""",
    ),
    "virtual-functions": (
        with_virtual_functions,
        """\
GPU 0 ─┬─ PIX mlx5_0:1  400 Gb/s  rail 0
       └─ PIX virt_0:1  400 Gb/s  rail 0
GPU 1 ─┬─ PIX mlx5_1:1  400 Gb/s  rail 1
       └─ PIX virt_1:1  400 Gb/s  rail 1
""",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_host_as_it_is_sold_or_breaks_has_this_picture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build, picture = PICTURES[name]
    build(tmp_path)
    (tmp_path / "class/net").mkdir(parents=True, exist_ok=True)
    main(["doctor", "--topology", "--path.sysfs", str(tmp_path)])
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("note", "ok"))]
    assert "\n".join(line.partition("  →")[0] for line in shown) + "\n" == picture


def test_files_of_machines_as_they_are_sold_have_these_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {
        "rails and planes of a card's functions": """\
GPU 0 ─┬─ PIX mlx5_0:1  400 Gb/s  rail 0, plane 0
       └─ PIX mlx5_1:1  400 Gb/s  rail 0, plane 1
GPU 1 ─┬─ PIX mlx5_2:1  400 Gb/s  rail 1, plane 0
       └─ PIX mlx5_3:1  400 Gb/s  rail 1, plane 1
FILE: 2 GPUs, 4 ports, 2 rails
""",
        "data direct functions, crossed": """\
GPU 0 ─── PXB fab1_dma:1  400 Gb/s  rail 0
GPU 1 ─── PXB fab0_dma:1  400 Gb/s  rail 1
GPU 2 ─── PXB fab3_dma:1  400 Gb/s  rail 2
GPU 3 ─── PXB fab2_dma:1  400 Gb/s  rail 3
FILE: 4 GPUs, 4 ports, 4 rails
""",
        "a function of two GPUs": """\
GPU 0 ─┬─ PIX mlx5_0:1  400 Gb/s  rail 0
GPU 1 ─┘
FILE: 2 GPUs, 1 port, 1 rail
""",
    }
    for shape in SHAPES:
        if shape.name in wanted:
            file = tmp_path / "topology.xml"
            file.write_bytes(shape.data)
            assert main(["doctor", "--topology", str(file)]) == 0
            assert capsys.readouterr().out.replace(str(file), "FILE") == wanted.pop(shape.name)
    assert not wanted
