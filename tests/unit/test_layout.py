"""Layouts come from the table, from debug information, from machine code, or not at all; never from a guess."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.layouts import dwarf as dwarf_layouts
from railscope.probes.nccl.layouts import layout
from railscope.probes.nccl.layouts.dwarf import structures_in
from railscope.probes.nccl.layouts.layout import (
    CommLayout,
    Layouts,
    LayoutTableError,
    Structure,
    comm_layout,
    layout_from_answer,
)
from railscope.probes.nccl.layouts.unknown_build import loaded_offsets
from tests.unit.elf_writer import WantedElf, WantedSymbol, write_elf

BUILD_2_27_7 = "401f52e455b9a6bec6a7c04241b464253dd1ef15"
SOURCE = """
#include <stdint.h>
typedef struct { int size; const char *commName; } config_t;
struct ncclComm {
    uint64_t startMagic;
    char padding[PADDING];
    union { struct { uint64_t magic; }; double unused; };
    uint64_t commHash;
    int rank; const int nRanks; int cudaDev; int nvmlDev;
    int gap[4];
    int64_t busId;
    int node, nNodes, localRank, localRanks;
    volatile uint64_t opCount;
    config_t config;
    int asyncResult;
    uint64_t endMagic;
};
struct ncclComm kept;
static int valid(struct ncclComm *comm) { return comm && comm->startMagic == comm->endMagic; }
#define ACCESSOR(name, field) \\
    int name(struct ncclComm *comm, int *out) { if (!valid(comm)) return 4; *out = comm->field; return 0; }
ACCESSOR(ncclCommCount, nRanks)
ACCESSOR(ncclCommUserRank, rank)
ACCESSOR(ncclCommCuDevice, cudaDev)
const char *version(void) { return "NCCL version " VERSION "+cuda12.9"; }
uint64_t profiled;
#define COLLECTIVE(name) int name(void *send, struct ncclComm *comm) { profiled = comm ? comm->HANDED : 0; return 0; }
COLLECTIVE(ncclAllReduce)
COLLECTIVE(ncclBroadcast)
"""
PADDING = 100_000
HASH_AT = 8 + PADDING + 8


def build(
    folder: Path, *flags: str, source: str = SOURCE, version: str = "2.98.7", handed_to_nvtx: str = "commHash"
) -> Path:
    (folder / "small.c").write_text(source)
    library = folder / "libsmall.so"
    defines = [f"-DPADDING={PADDING}", f'-DVERSION="{version}"', f"-DHANDED={handed_to_nvtx}"]
    subprocess.run(
        ["gcc", "-shared", "-fPIC", *defines, *flags, "-o", str(library), str(folder / "small.c")], check=True
    )
    return library


@contextmanager
def opened(path: Path) -> Iterator[Elf]:
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        yield elf


@pytest.fixture(scope="module")
def table() -> Layouts:
    return Layouts.load()


def test_the_table_holds_what_the_published_builds_say_of_themselves(table: Layouts) -> None:
    comm = table.structures(BUILD_2_27_7)["ncclComm"]
    assert comm.size_bytes == 1_080_320
    assert comm.offsets["config.commName"] == 1074384 + 48
    assert table.structures(BUILD_2_27_7)["ncclTaskColl"].offsets["protocol"] == 99
    assert table.structures(BUILD_2_27_7)["ncclNetSocketComm"].offsets["dev"] == 6240


def test_a_known_build_is_answered_from_the_table_without_its_debug_information(table: Layouts, tmp_path: Path) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(write_elf(WantedElf(build_id=bytes.fromhex(BUILD_2_27_7), section_headers=False)).data)
    with opened(path) as elf:
        assert table.nccl_version_of(elf) == "2.27.7"
        assert table.layout_of(elf) == CommLayout(
            source="build-id",
            nccl_version="2.27.7",
            start_magic=0,
            comm_hash=1066160,
            rank=1066168,
            nranks=1066172,
            cuda_dev=1066176,
            nvml_dev=1066180,
            bus_id=1066200,
            node=1066348,
            n_nodes=1066352,
            local_rank=1066356,
            local_ranks=1066360,
            op_count=1066432,
            async_result=1067844,
            end_magic=1080312,
        )


def test_every_build_of_the_table_is_complete_and_plausible() -> None:
    content = json.loads(layout.TABLE.read_text())
    table = Layouts.load()
    assert {build["nccl_version"] for build in content["builds"].values()} >= {
        "2.21.5",
        "2.23.4",
        "2.27.7",
        "2.28.9",
        "2.32.3",
    }
    for build_id in content["builds"]:
        comm = table.structures(build_id)["ncclComm"]
        found = comm_layout(comm, "build-id", "2")
        assert found is not None
        unknown = {field for field in CommLayout.__slots__ if getattr(found, field) is None}
        assert (found.comm_hash, found.nranks) == (found.rank - 8, found.rank + 4)
        if content["builds"][build_id]["nccl_version"] < "2.21":
            assert {"start_magic", "end_magic"} <= unknown <= {"start_magic", "end_magic", "nvml_dev"}, "no marks"
            continue
        assert unknown == set()
        assert (found.start_magic, found.end_magic) == (0, comm.size_bytes - 8)


def test_a_small_library_is_answered_from_its_own_debug_information(table: Layouts, tmp_path: Path) -> None:
    for flags in (["-g", "-gdwarf-4"], ["-g", "-gdwarf-5"], ["-g", "-gz"]):
        with opened(build(tmp_path, *flags)) as elf:
            found = table.layout_of(elf)
        assert found == CommLayout(
            source="dwarf",
            nccl_version="2.98.7",
            start_magic=0,
            comm_hash=HASH_AT,
            rank=HASH_AT + 8,
            nranks=HASH_AT + 12,
            cuda_dev=HASH_AT + 16,
            nvml_dev=HASH_AT + 20,
            bus_id=HASH_AT + 40,
            node=HASH_AT + 48,
            n_nodes=HASH_AT + 52,
            local_rank=HASH_AT + 56,
            local_ranks=HASH_AT + 60,
            op_count=HASH_AT + 64,
            async_result=HASH_AT + 88,
            end_magic=HASH_AT + 96,
        )


@pytest.mark.parametrize("optimisation", ["-O0", "-O2"])
def test_without_debug_information_the_accessors_tell_rank_and_hash_and_nothing_more(
    table: Layouts, tmp_path: Path, optimisation: str
) -> None:
    with opened(build(tmp_path, optimisation, "-s", "-Wl,--build-id=none")) as elf:
        assert table.layout_of(elf) == CommLayout(
            source="accessors",
            nccl_version="2.98.7",
            start_magic=0,
            comm_hash=HASH_AT,
            rank=HASH_AT + 8,
            nranks=HASH_AT + 12,
            cuda_dev=HASH_AT + 16,
        )


def test_a_hash_that_no_collective_hands_on_is_not_believed(table: Layouts, tmp_path: Path) -> None:
    """A version to come may put a field between: read as a name, it would join strangers on other hosts."""
    between = SOURCE.replace("int rank;", "uint64_t field; int rank;")
    with opened(build(tmp_path, "-O2", "-s", "-Wl,--build-id=none", source=between)) as elf:
        assert table.layout_of(elf) == CommLayout(
            source="accessors",
            nccl_version="2.98.7",
            start_magic=0,
            comm_hash=None,
            rank=HASH_AT + 16,
            nranks=HASH_AT + 20,
            cuda_dev=HASH_AT + 24,
        )


def test_one_collective_that_hands_on_something_else_leaves_the_hash_unknown(table: Layouts, tmp_path: Path) -> None:
    source = SOURCE.replace("COLLECTIVE(ncclBroadcast)", "int ncclBroadcast(struct ncclComm *c) { return c->node; }")
    with opened(build(tmp_path, "-O2", "-s", "-Wl,--build-id=none", source=source)) as elf:
        found = table.layout_of(elf)
    assert found is not None
    assert (found.rank, found.comm_hash) == (HASH_AT + 8, None)


@pytest.mark.parametrize(
    ("version", "comm_hash"),
    [("2.17.1", None), ("2.18.1", HASH_AT), ("2.20.5", HASH_AT), ("2.25.1", HASH_AT), ("2.26.2", None)],
)
def test_versions_that_hand_on_no_hash_are_known_to_keep_it_before_the_rank(
    table: Layouts, tmp_path: Path, version: str, comm_hash: int | None
) -> None:
    library = build(tmp_path, "-O2", "-s", "-Wl,--build-id=none", version=version, handed_to_nvtx="opCount")
    with opened(library) as elf:
        found = table.layout_of(elf)
    assert found is not None
    assert (found.nccl_version, found.comm_hash, found.start_magic) == (version, comm_hash, 0)


def test_accessors_that_do_not_fit_together_tell_nothing(table: Layouts, tmp_path: Path) -> None:
    shuffled = SOURCE.replace("int rank; const int nRanks;", "int nRanks; int rank;")
    with opened(build(tmp_path, "-O2", source=shuffled)) as elf:
        assert table.layout_of(elf) is None
    several = SOURCE.replace("comm->startMagic == comm->endMagic", "comm->rank + comm->nRanks + comm->cudaDev > 0")
    several = several.replace("int rank; const int nRanks; int cudaDev; int nvmlDev", "int rank, nRanks, cudaDev, more")
    several = several.replace("int gap[4]", "int gap[4], twin, nvmlDev")
    with opened(build(tmp_path, "-O2", source=several)) as elf:
        found = table.layout_of(elf)
    assert found is not None
    assert found.rank == HASH_AT + 8, "every accessor reads all three fields, and one triple still fits"


def test_a_triple_that_does_not_begin_where_a_hash_can_end_tells_nothing(table: Layouts, tmp_path: Path) -> None:
    moved = SOURCE.replace("int rank; const int nRanks;", "int more; int rank; const int nRanks;")
    with opened(build(tmp_path, "-O2", source=moved)) as elf:
        assert table.layout_of(elf) is None


def test_two_triples_that_fit_tell_nothing(table: Layouts, tmp_path: Path) -> None:
    twice = SOURCE.replace("*out = comm->field;", "*out = comm->field + comm->gap[TWIN_##field];")
    twins = ("-DTWIN_rank=0", "-DTWIN_nRanks=1", "-DTWIN_cudaDev=2")
    with opened(build(tmp_path, "-O0", *twins, source=twice)) as elf:
        assert table.layout_of(elf) is None


def test_a_library_without_accessors_is_unknown_without_asking_the_helper(
    table: Layouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("the helper was started"))
    path = tmp_path / "libother.so"
    path.write_bytes(write_elf(WantedElf([WantedSymbol("ncclAllReduce")])).data)
    with opened(path) as elf:
        assert table.layout_of(elf) is None
        assert table.nccl_version_of(elf) == "unknown"


def test_damaged_debug_information_falls_back_to_the_accessors(table: Layouts, tmp_path: Path) -> None:
    library = build(tmp_path, "-g", "-Wl,--build-id=none")
    data = bytearray(library.read_bytes())
    with opened(library) as elf:
        section = elf.section(".debug_info")
    assert section is not None
    data[section.offset + 4 : section.offset + section.size_bytes] = b"\xa5" * (section.size_bytes - 4)
    library.write_bytes(data)
    with opened(library) as elf:
        found = table.layout_of(elf)
    assert found is not None
    assert (found.source, found.rank) == ("accessors", HASH_AT + 8)


def test_a_helper_that_does_not_end_means_unknown_until_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = Layouts({})
    with opened(build(tmp_path, "-O2")) as elf:
        with monkeypatch.context() as patched:
            patched.setattr(layout, "HELPER_SECONDS", 0.001)
            assert table.layout_of(elf) is None
        assert "timed out" in caplog.text
        found = table.layout_of(elf)
        assert found is not None, "another time it may answer"
        assert found.source == "accessors"


@pytest.mark.parametrize(
    ("resource", "at_most"), [("RLIMIT_AS", 2 << 30), ("RLIMIT_CPU", 5), ("RLIMIT_CORE", 0)], ids=lambda one: str(one)
)
def test_whatever_a_library_holds_the_helper_takes_no_more_than_its_share(resource: str, at_most: int) -> None:
    script = (
        "import resource, sys\n"
        "from railscope.probes.nccl.layouts import unknown_build\n"
        f"unknown_build.from_debug_information = lambda _: sys.exit(str(resource.getrlimit(resource.{resource})))\n"
        "unknown_build.main(['dwarf', str(sys.stdin.fileno()), 'unknown'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stderr.strip() == str((at_most, at_most))


def test_an_unknown_build_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Layouts({})
    with opened(build(tmp_path, "-O2")) as elf:
        first = table.layout_of(elf)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("the helper was started again"))
        assert first is not None
        assert table.layout_of(elf) is first


def test_loads_of_the_stack_of_globals_and_arrays_and_wider_ones_do_not_count() -> None:
    code = bytes.fromhex(
        "418b8424e8441000"  # mov eax, [r12+0x1044e8]
        "8b842410010000"  # mov eax, [rsp+0x110]
        "498b8424e8551000"  # mov rax, [r12+0x1055e8]
        "8b4740"  # mov eax, [rdi+0x40]
        "8b4710"  # mov eax, [rdi+0x10]
        "8b0500010000"  # mov eax, [rip+0x100]
        "8b848750010000"  # mov eax, [rdi+rax*4+0x150]
        "8b042560010000"  # mov eax, [0x160]
        "c3"
    )
    assert loaded_offsets(code) == {0x1044E8, 0x40}


@given(st.binary(max_size=300))
def test_any_answer_of_the_helper_is_checked(answer: bytes) -> None:
    assert layout_from_answer(answer, "2") is None


@pytest.mark.parametrize(
    "answer",
    [
        b"null",
        b"[]",
        b'{"source": "dwarf"}',
        b'{"source": "guess", "size_bytes": 99, "offsets": {"commHash":0,"rank":8,"nRanks":12,"cudaDev":16}}',
        b'{"source": "dwarf", "size_bytes": 9, "offsets": {"commHash":0,"rank":8,"nRanks":12,"cudaDev":16}}',
        b'{"source": "dwarf", "size_bytes": 99, "offsets": {"commHash":-8,"rank":0,"nRanks":4,"cudaDev":8}}',
        b'{"source": "dwarf", "size_bytes": 99, "offsets": {"rank":0,"nRanks":4,"cudaDev":8}}',
    ],
)
def test_an_implausible_answer_means_unknown(answer: bytes) -> None:
    assert layout_from_answer(answer, "2") is None


@pytest.mark.parametrize("content", ["", "{}", '{"layouts": {}, "builds": {"ab": {"layout": "x"}}}', "[1]"])
def test_a_damaged_table_says_so(tmp_path: Path, content: str) -> None:
    path = tmp_path / "layouts.json"
    path.write_text(content)
    with pytest.raises(LayoutTableError, match=r"is missing or damaged .*: run 'git status' in"):
        Layouts.load(path)
    with pytest.raises(LayoutTableError, match="missing"):
        Layouts.load(tmp_path / "none.json")


def test_the_command_adds_a_wheels_library_to_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = build(tmp_path, "-g")
    twin = build(tmp_path, "-g", "-O2").rename(tmp_path / "twin.so")
    library = build(tmp_path, "-g")
    wheel = tmp_path / "nccl.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "nvidia/nccl/lib/libnccl.so.2")
    path = tmp_path / "layouts.json"
    assert dwarf_layouts.main([str(wheel), str(twin), "--table", str(path)]) == 0
    content = json.loads(path.read_text())
    assert len(content["builds"]) == 2
    assert len(content["layouts"]) == 1, "builds with one layout share it"
    with opened(library) as elf:
        found = Layouts.load(path).layout_of(elf)
        assert Layouts.load(path).structures(elf.build_id)["ncclComm"].offsets["config.commName"] == HASH_AT + 80
    assert found is not None
    assert (found.source, found.nccl_version, found.rank) == ("build-id", "2.98.7", HASH_AT + 8)
    assert "NCCL 2.98.7" in capsys.readouterr().out


def test_the_command_refuses_a_library_without_debug_information(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layouts.json"
    assert dwarf_layouts.main([str(build(tmp_path, "-s")), "--table", str(path)]) == 2
    assert "no build-id or no debug information" in capsys.readouterr().err
    assert dwarf_layouts.main([str(tmp_path / "none.so"), "--table", str(path)]) == 2
    assert dwarf_layouts.main([str(build(tmp_path, "-g", version="x")), "--table", str(path)]) == 2
    assert "does not say which version of NCCL it is" in capsys.readouterr().err
    assert not path.exists()


def test_the_command_leaves_a_table_that_it_cannot_renew_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layouts.json"
    library = str(build(tmp_path, "-g"))
    assert dwarf_layouts.main([library, "--table", str(tmp_path / "no-folder/layouts.json")]) == 2
    assert "the table cannot be written: No such file" in capsys.readouterr().err
    assert dwarf_layouts.main([library, "--table", str(path)]) == 0
    before = path.read_bytes()
    other = str(build(tmp_path, "-g", "-O2"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert dwarf_layouts.main([other, "--table", str(path)]) == 2
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


def test_what_is_no_table_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, library = tmp_path / "layouts.json", str(build(tmp_path, "-g"))
    for content in ("{", "[]", "{}", '{"layouts": {}}', '{"layouts": {}, "builds": {"00": {}}}'):
        path.write_text(content)
        assert dwarf_layouts.main([library, "--table", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{path}: it is not a table of layouts: ")
        assert path.read_text() == content
    assert not list(tmp_path.glob("*.partial"))


def test_commands_that_renew_a_table_at_once_lose_no_build(tmp_path: Path) -> None:
    path, libraries = tmp_path / "layouts.json", []
    for version in ("2.98.1", "2.98.2", "2.98.3", "2.98.4"):
        (tmp_path / version).mkdir()
        libraries.append(build(tmp_path / version, "-g", version=version))
    command = [sys.executable, "-m", "railscope.probes.nccl.layouts.dwarf", "--table", str(path)]
    running = [subprocess.Popen([*command, str(library)], stdout=subprocess.DEVNULL) for library in libraries]
    assert [each.wait(60) for each in running] == [0] * 4
    assert [build["nccl_version"] for build in json.loads(path.read_text())["builds"].values()] == [
        *("2.98.1", "2.98.2", "2.98.3", "2.98.4")
    ]


def test_bit_fields_on_byte_borders_have_offsets_and_others_do_not(tmp_path: Path) -> None:
    source = "struct task { int a; int whole:8, next:8; unsigned odd:3, after:5; } kept;"
    for flags in (["-g", "-gdwarf-5"], ["-g", "-gdwarf-3"]):
        with build(tmp_path, *flags, source=source).open("rb") as file:
            found = dwarf_layouts.structures_in(file, {"task": ["a", "whole", "next", "odd", "after", "none"]})
        assert found == {"task": Structure(8, {"a": 0, "whole": 4, "next": 5, "odd": 6})}


def test_compile_units_that_disagree_are_refused_and_those_that_agree_are_not(tmp_path: Path) -> None:
    sources = []
    for name, fields in (("one", "int a, b;"), ("same", "int a, b;"), ("other", "long a; int b;")):
        sources.append(tmp_path / f"{name}.c")
        sources[-1].write_text(f"struct task {{ {fields} }} {name};")
    for other, agree in (("same", True), ("other", False)):
        library = tmp_path / f"lib{other}.so"
        subprocess.run(["gcc", "-shared", "-g", "-o", library, tmp_path / "one.c", tmp_path / f"{other}.c"], check=True)
        with library.open("rb") as file:
            if agree:
                assert dwarf_layouts.structures_in(file, {"task": ["b"]}) == {"task": Structure(8, {"b": 4})}
            else:
                with pytest.raises(dwarf_layouts.ConflictError, match="define task differently"):
                    dwarf_layouts.structures_in(file, {"task": ["b"]})


def test_static_members_have_no_offset(tmp_path: Path) -> None:
    source, library = tmp_path / "task.cc", tmp_path / "libtask.so"
    source.write_text("struct task { int a; static int shared; int b; }; int task::shared; task kept;")
    subprocess.run(["clang", "-shared", "-fPIC", "-g", "-gdwarf-4", "-o", library, source], check=True)
    with library.open("rb") as file:
        found = dwarf_layouts.structures_in(file, {"task": ["a", "shared", "b"]})
    assert found == {"task": Structure(8, {"a": 0, "b": 4})}


def test_the_daemon_itself_never_loads_the_parsers(tmp_path: Path) -> None:
    library = build(tmp_path, "-g")
    script = (
        "import os, sys\n"
        "from railscope.probes.libraries.elf import Elf\n"
        "from railscope.probes.nccl.layouts.layout import Layouts\n"
        "with open(sys.argv[1], 'rb') as file, Elf.open(file.fileno()) as elf:\n"
        "    print(Layouts.load().layout_of(elf).source)\n"
        "print(sorted({'elftools', 'capstone'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", script, str(library)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    assert output.split() == ["dwarf", "[]"]


def test_names_that_dwz_has_moved_to_another_file_are_no_names(tmp_path: Path) -> None:
    """As debuggers' packages of distributions have it: what libraries share lies in /usr/lib/debug/.dwz."""
    if shutil.which("dwz") is None:
        pytest.skip("dwz is missing: run 'make packages-test' as root")
    source = tmp_path / "library.c"
    fields = "".join(f"long a_field_with_a_name_that_is_long_enough_to_move_{number};" for number in range(40))
    source.write_text(f"struct ncclComm {{ int rank; int nRanks; {fields} }} communicator;\n")
    libraries = [tmp_path / f"{name}.so" for name in "ab"]
    for library in libraries:
        subprocess.run(["gcc", "-g", "-shared", "-fPIC", source, "-o", library], check=True)
    subprocess.run(["dwz", "-m", tmp_path / "shared.debug", *libraries], check=True)
    with libraries[0].open("rb") as stream:
        assert structures_in(stream, {"ncclComm": ["rank"]}) == {}
