"""Communication libraries are known by what a file defines, however it is called, stripped or linked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.agent.node.inspection.questions import Memory
from railscope.agent.node.targets.sightings import Look
from railscope.probes.libraries.communication import MARKERS, NO_LIBRARY, CommunicationLibrary, libraries_in
from railscope.probes.libraries.elf import Elf
from railscope.probes.processes.processes import PROCFS
from tests.unit.elf_writer import STB_LOCAL, WantedElf, WantedSymbol, write_elf


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


@contextmanager
def mapping_process(*paths: Path) -> Iterator[int]:
    """A process that maps these files; that of the tests may map NCCL itself, for another test."""
    code = """
import mmap, sys
files = [open(path, "rb") for path in sys.argv[1:]]
kept = [mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC) for file in files]
print(flush=True)
input()
"""
    command = [sys.executable, "-c", code, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_look_tells_every_library_of_a_process_whatever_its_files_are_called(tmp_path: Path) -> None:
    renamed, both = tmp_path / "libucp-6d3f.so.0.0.0", tmp_path / "engine.so"
    renamed.write_bytes(write_elf(WantedElf(exported=[WantedSymbol(MARKERS[CommunicationLibrary.UCX])])).data)
    two = (CommunicationLibrary.NCCL, CommunicationLibrary.MPI)
    both.write_bytes(write_elf(WantedElf(exported=[WantedSymbol(MARKERS[one]) for one in two])).data)
    for paths, libraries in (((), NO_LIBRARY), ((renamed, both), {CommunicationLibrary.UCX, *two})):
        with mapping_process(*paths) as pid:
            sighting = Look(str(PROCFS), pid).find(Memory(), ()).answer
        assert sighting.libraries == libraries
        assert [one.path for one in sighting.nccl] == [str(path) for path in paths if path == both]
        assert {one.path for one in sighting.others} == {str(path) for path in paths}
