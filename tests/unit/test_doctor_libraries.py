"""What the doctor says of libraries: processes are folders that look like /proc, libraries are real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from railscope.agent.cli.main import main
from railscope.agent.config.options import Config
from railscope.agent.doctor.findings import Finding
from railscope.agent.doctor.libraries import check_libraries
from railscope.agent.node.inspection.inspection import InProcess
from railscope.probes.loading.libbpf import LoadError
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.processes.processes import MappedFileError, Mapping, open_mapped_file
from tests.trees.pci import dgx_h100
from tests.unit.elf_writer import WantedElf, WantedSymbol, write_elf
from tests.unit.test_processes import SimulatedProcfs

CONSTANTS = b"NCCL version 2.97.1+cuda12.9\0"


@pytest.fixture
def procfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedProcfs:
    """No programs can be loaded, so that nothing is attached."""

    def refused(*_: object) -> NcclPrograms:
        raise LoadError("simulated refusal")

    monkeypatch.setattr(NcclPrograms, "load", refused)
    (tmp_path / "proc").mkdir()
    return SimulatedProcfs(tmp_path / "proc")


def maps(path: Path) -> bytes:
    status = path.stat()
    device = f"{status.st_dev >> 8 & 0xFFF:x}:{status.st_dev & 0xFF | status.st_dev >> 12 & 0xFFF00:x}"
    return f"7f0000000000-7f0000001000 r-xp 00000000 {device} {status.st_ino} {path}\n".encode()


def check(procfs: SimulatedProcfs) -> dict[str, Finding]:
    found, _, _ = check_libraries(Config(procfs=procfs.root), InProcess())
    return {finding.check: finding for finding in found}


def test_a_library_whose_layout_alone_is_unknown_says_what_is_lost_and_how_to_list_it(
    procfs: SimulatedProcfs, tmp_path: Path
) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(write_elf(WantedElf([WantedSymbol("ncclAllReduce")], constants=CONSTANTS)).data)
    procfs.add(7, maps=maps(library))
    finding = check(procfs)["NCCL library"]
    assert finding.status == "note"
    assert f"{library}: NCCL 2.97.1, in 1 process, " in finding.what
    assert "communicators have no identity" in finding.what
    assert "listed builds only" not in finding.what
    assert "python -m railscope.probes.nccl.layouts.dwarf LIBRARY" in finding.remedy


def test_a_file_that_cannot_be_read_for_another_reason_is_no_matter_of_rights(
    procfs: SimulatedProcfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"")
    procfs.add(8, maps=maps(broken))

    def failing(_root: Path, pid: int, _mapping: Mapping) -> int:
        raise MappedFileError(f"{broken}, mapped by process {pid}: Input/output error")

    monkeypatch.setattr("railscope.agent.node.targets.sightings.open_mapped_file", failing)
    unread = check(procfs)["mapped files"]
    assert unread.status == "problem"
    assert unread.what.startswith(
        f"1 could not be looked at: whether they contain NCCL is unknown; the first: {broken}"
    )
    assert "no permission" not in unread.what
    assert unread.remedy.startswith("run railscope doctor again")


def test_files_that_cannot_be_opened_are_a_problem_for_they_may_hold_nccl(
    procfs: SimulatedProcfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def within_rights(root: Path, pid: int, mapping: Mapping) -> int:
        if mapping.path == str(secret):
            raise MappedFileError(
                f"{secret}, mapped by process {pid}, cannot be opened (no permission): grant railscope CAP_X"
            )
        return open_mapped_file(root, pid, mapping)

    monkeypatch.setattr("railscope.agent.node.targets.sightings.open_mapped_file", within_rights)
    library, secret = tmp_path / "libnccl.so.2", tmp_path / "secret.so"
    for path in (library, secret):
        path.write_bytes(write_elf(WantedElf([WantedSymbol("ncclAllReduce")], constants=CONSTANTS)).data)
    procfs.add(7, maps=maps(library))
    procfs.add(8, maps=maps(secret))
    found = check(procfs)
    unopened = found["mapped files"]
    assert unopened.status == "problem"
    assert unopened.what.startswith(
        f"1 cannot be opened (no permission): whether they contain NCCL is unknown; the first: {secret}, "
    )
    assert unopened.remedy
    assert str(library) in found["NCCL library"].what


def test_rails_have_the_same_numbers_with_and_without_the_other_checks(
    procfs: SimulatedProcfs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job numbers its rails: what names none of its settings would show other numbers than the agent."""
    machine = dgx_h100(tmp_path / "sys")
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(write_elf(WantedElf([WantedSymbol("ncclAllReduce")], constants=CONSTANTS)).data)
    procfs.add(7, maps=maps(library))
    (procfs.root / "self").mkdir()
    (procfs.root / "self/status").write_text("Name:\tdoctor\n")
    (procfs.root / "7/environ").write_bytes(b"NCCL_IB_HCA==mlx5_0:1:5,mlx5_3:1:4\0")
    roots = ["--path.sysfs", str(machine.sysfs), "--path.procfs", str(procfs.root)]
    numbers = []
    for arguments in (["doctor", "--json"], ["doctor", "--json", "--topology"]):
        main([*arguments, *roots])
        told = capsys.readouterr()
        assert told.err == ""
        topology = json.loads(told.out)["topology"]
        numbers.append({port["device"]: port["rail"] for port in topology["rails"]})
    whole, alone = numbers
    assert (whole["mlx5_0"], whole["mlx5_3"]) == ("5", "4")
    assert alone == whole
