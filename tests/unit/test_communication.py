"""Communication libraries are known by what a file defines, however it is called, stripped or linked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from railscope.agent.node.inspection.questions import Memory
from railscope.agent.node.targets.sightings import Look
from railscope.probes.libraries.communication import MARKERS, NO_LIBRARY, CommunicationLibrary, libraries_in
from railscope.probes.libraries.elf import Elf
from railscope.probes.processes.processes import PROCFS
from tests.unit.elf_writer import STB_LOCAL, WantedElf, WantedSymbol, write_elf
from tests.unit.test_processes import mapped_executable


def found_in(wanted: WantedElf) -> frozenset[CommunicationLibrary]:
    descriptor = os.memfd_create("library")
    try:
        os.write(descriptor, write_elf(wanted).data)
        with Elf.open(descriptor) as elf:
            return libraries_in(elf)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("library", CommunicationLibrary)
def test_a_library_is_known_by_its_function_exported_or_linked_into_a_program(library: CommunicationLibrary) -> None:
    marker = MARKERS[library]
    assert found_in(WantedElf(exported=[WantedSymbol(marker)])) == {library}
    assert found_in(WantedElf(internal=[WantedSymbol(marker, binding=STB_LOCAL)])) == {library}
    user = WantedElf(exported=[WantedSymbol(marker, defined=False)], internal=[WantedSymbol(marker, defined=False)])
    assert found_in(user) == NO_LIBRARY, "who calls a library is none"
    assert found_in(WantedElf(exported=[WantedSymbol(marker)], machine=40)) == NO_LIBRARY


def test_a_look_tells_every_library_of_a_process_whatever_its_files_are_called(tmp_path: Path) -> None:
    renamed, both = tmp_path / "libucp-6d3f.so.0.0.0", tmp_path / "engine.so"
    renamed.write_bytes(write_elf(WantedElf(exported=[WantedSymbol(MARKERS[CommunicationLibrary.UCX])])).data)
    two = (CommunicationLibrary.NCCL, CommunicationLibrary.MPI)
    both.write_bytes(write_elf(WantedElf(exported=[WantedSymbol(MARKERS[one]) for one in two])).data)
    question, memory = Look(str(PROCFS), os.getpid()), Memory()
    assert question.find(memory, ()).answer.libraries == NO_LIBRARY
    with mapped_executable(renamed), mapped_executable(both):
        sighting = question.find(memory, ()).answer
    assert sighting.libraries == {CommunicationLibrary.UCX, *two}
    assert [one.path for one in sighting.nccl] == [str(both)]
    assert {one.path for one in sighting.others} == {str(renamed), str(both)}
