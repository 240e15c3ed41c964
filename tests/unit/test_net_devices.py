"""NCCL's network devices are read from memory under their right names, or not at all.

No machine with RDMA is needed: a small program has arrays of the same names and layout as NCCL's (simulated).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.libraries.elf import Elf, Segment
from railscope.probes.nccl.layouts.layout import TABLE, Layouts, Structure
from railscope.probes.nccl.memory.net_devices import (
    DeviceArray,
    DeviceArrays,
    NetDevice,
    NetDeviceError,
    device_arrays,
    devices_in,
    load_biases,
    net_devices,
)
from railscope.probes.nccl.records.internals import NetworkKind
from railscope.probes.processes.processes import FileKey, ProcessIdentity, executable_mappings, identity_of

PROCFS = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
FILE = FileKey((8, 1), 77)
STRUCTURES = {
    "ncclNetSocketDev": Structure(56, {"devName": 28}),
    "ncclIbDev": Structure(320, {"devName": 88, "portNum": 56}),
}
"""As in NCCL 2.28.9 for x86-64."""

SOCKETS = DeviceArray(NetworkKind.SOCKET, 0, 16, 56, 28, None, 0)
RDMA = DeviceArray(NetworkKind.IB, 0, 32, 320, 88, 56, 0)

SOURCE = """
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define NAMED(name) __asm__(name) __attribute__((used))
static char sockets[16][56] NAMED("ncclNetSocketDevs");
static int socket_count NAMED("_ZL10ncclNetIfs") = -1;
char adapters[IB_BYTES] NAMED("ncclIbDevs");
static int adapter_count NAMED("ncclNIbDevs") = -1;

static void adapter(int number, const char *name, int port) {
    memcpy(adapters + number * 320 + 88, name, strlen(name));
    adapters[number * 320 + 56] = (char)port;
}

__attribute__((constructor)) static void find_devices(void) {
    strcpy(sockets[0] + 28, "eth0");
    strcpy(sockets[1] + 28, "enp65s0f0np0v12");
    strcpy(sockets[2] + 28, "not a name");
    adapter(0, "mlx5_0", 1);
    adapter(1, "mlx5_1_dma", 2);
    adapter(2, "bad\\x01name", 1);
    adapter(3, "portless", 0);
    adapter(4, "rocep7s0", 1);
    socket_count = atoi(getenv("SOCKETS"));
    adapter_count = atoi(getenv("ADAPTERS"));
}
#ifdef PROGRAM
int main(void) {
    write(1, "ready\\n", 6);
    return pause();
}
#endif
"""
ALL_NAMES = {
    NetDevice(NetworkKind.SOCKET, 0, "eth0", None),
    NetDevice(NetworkKind.SOCKET, 1, "enp65s0f0np0v12", None),
    NetDevice(NetworkKind.IB, 0, "mlx5_0", 1),
    NetDevice(NetworkKind.IB, 1, "mlx5_1", 2),
    NetDevice(NetworkKind.IB, 4, "rocep7s0", 1),
}
LOADER = "import ctypes, signal, sys; ctypes.CDLL(sys.argv[1]); print('ready', flush=True); signal.pause()"


def compiled(folder: Path, *flags: str, ib_bytes: int = 32 * 320) -> Path:
    source, to = folder / "devices.c", folder / "devices"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-O1", f"-DIB_BYTES={ib_bytes}", *flags, "-o", str(to), str(source)], check=True)
    return to


@contextmanager
def running(file: Path, *, program: bool, sockets: int = 3, adapters: int = 5) -> Iterator[int]:
    command = [str(file)] if program else [sys.executable, "-c", LOADER, str(file)]
    environment = os.environ | {"SOCKETS": str(sockets), "ADAPTERS": str(adapters)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def arrays_of(file: Path, structures: Mapping[str, Structure] = STRUCTURES) -> DeviceArrays:
    with file.open("rb") as opened, Elf.open(opened.fileno()) as elf:
        return device_arrays(elf, structures)


def key_of(pid: int, file: Path) -> FileKey:
    return next(mapping.file for mapping in executable_mappings(PROCFS, pid) if mapping.path == str(file))


def read(pid: int, file: Path) -> set[NetDevice]:
    process = identity_of(PROCFS, pid)
    assert process is not None
    return set(net_devices(PROCFS, process, key_of(pid, file), arrays_of(file)))


@pytest.mark.parametrize(
    ("flags", "program"),
    [
        (("-shared", "-fPIC"), False),
        (("-DPROGRAM", "-fPIE", "-pie"), True),
        (("-DPROGRAM", "-fno-pie", "-no-pie"), True),
        (("-shared", "-fPIC", "-Wl,-z,separate-code"), False),
        (("-shared", "-fPIC", "-Wl,-z,noseparate-code"), False),
    ],
    ids=["library", "program", "program at its own address", "code in a segment of its own", "code in the first"],
)
def test_devices_are_named_wherever_the_library_came_to_lie(
    tmp_path: Path, flags: tuple[str, ...], program: bool
) -> None:
    file = compiled(tmp_path, *flags)
    with running(file, program=program) as pid:
        assert read(pid, file) == ALL_NAMES


@pytest.mark.parametrize(("sockets", "adapters"), [(-1, -1), (0, 0), (17, 33)])
def test_a_count_that_cannot_be_names_nothing(tmp_path: Path, sockets: int, adapters: int) -> None:
    file = compiled(tmp_path, "-shared", "-fPIC")
    with running(file, program=False, sockets=sockets, adapters=adapters) as pid:
        assert read(pid, file) == set()


def test_devices_beyond_the_count_are_not_named(tmp_path: Path) -> None:
    file = compiled(tmp_path, "-shared", "-fPIC")
    with running(file, program=False, sockets=1, adapters=1) as pid:
        assert {device.name for device in read(pid, file)} == {"eth0", "mlx5_0"}


def test_an_array_of_another_size_than_the_layout_says_is_not_read(tmp_path: Path) -> None:
    file = compiled(tmp_path, "-shared", "-fPIC", ib_bytes=32 * 320 + 64)
    assert [array.network for array in arrays_of(file).arrays] == [NetworkKind.SOCKET]


def test_a_stripped_library_and_an_unknown_build_tell_nothing(tmp_path: Path) -> None:
    file = compiled(tmp_path, "-shared", "-fPIC")
    assert arrays_of(file, {}).arrays == ()
    subprocess.run(["strip", str(file)], check=True)
    assert arrays_of(file).arrays == ()


def test_a_file_mapped_only_to_be_looked_at_is_not_the_library(tmp_path: Path) -> None:
    """A second, plain mapping of the same file lies at another address."""
    file = compiled(tmp_path, "-shared", "-fPIC")
    loader = "import mmap; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print"
    script = LOADER.replace("print", loader, 1)
    environment = os.environ | {"SOCKETS": "3", "ADAPTERS": "5"}
    command = [sys.executable, "-c", script, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert read(process.pid, file) == ALL_NAMES
        finally:
            process.kill()


def test_a_process_without_the_library_is_said_to_have_let_go_of_it(tmp_path: Path) -> None:
    file = compiled(tmp_path, "-shared", "-fPIC")
    process = identity_of(PROCFS, os.getpid())
    assert process is not None
    with pytest.raises(NetDeviceError, match="no longer mapped") as error:
        net_devices(PROCFS, process, FILE, arrays_of(file))
    assert error.value.gone


def test_a_process_that_is_dead_but_not_buried_has_ended(tmp_path: Path) -> None:
    file = compiled(tmp_path, "-shared", "-fPIC")
    with running(file, program=False) as pid:
        process, key = identity_of(PROCFS, pid), key_of(pid, file)
        assert process is not None
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(NetDeviceError) as error:
            net_devices(PROCFS, process, key, arrays_of(file))
    assert error.value.gone


def test_a_process_that_ends_while_it_is_read_has_ended(tmp_path: Path) -> None:
    """A recorded procfs whose memory is empty, as a dead process's memory reads (simulated)."""
    folder = recorded(tmp_path)
    (folder / "mem").write_bytes(b"")
    with pytest.raises(NetDeviceError, match="process 42 has ended") as error:
        net_devices(tmp_path, ProcessIdentity(42, 5), FILE, ARRAYS)
    assert error.value.gone


def test_memory_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    """A recorded procfs whose memory ends inside the array (simulated)."""
    folder = recorded(tmp_path)
    (folder / "mem").write_bytes(bytes(0x3000) + b"\x02\0\0\0" + bytes(60 + 56))
    with pytest.raises(NetDeviceError, match=r"^process 42: its memory cannot be read: Input/output error$") as error:
        net_devices(tmp_path, ProcessIdentity(42, 5), FILE, ARRAYS)
    assert not error.value.gone


def test_a_procfs_of_another_root_is_read(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    device = b"eth7".rjust(32, b"\0").ljust(56, b"\0")
    (folder / "mem").write_bytes(bytes(0x3000) + b"\x01\0\0\0" + bytes(60) + device)
    assert net_devices(tmp_path, ProcessIdentity(42, 5), FILE, ARRAYS) == (
        NetDevice(NetworkKind.SOCKET, 0, "eth7", None),
    )
    with pytest.raises(NetDeviceError, match="process 42 has ended"):  # an earlier owner of the pid
        net_devices(tmp_path, ProcessIdentity(42, 4), FILE, ARRAYS)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: lowers its own rights")
@pytest.mark.root
def test_missing_rights_are_named(tmp_path: Path) -> None:
    """From a process of another user, which /proc/PID/mem refuses."""
    file = compiled(tmp_path, "-shared", "-fPIC")
    with running(file, program=False) as pid:
        process, key, arrays = identity_of(PROCFS, pid), key_of(pid, file), arrays_of(file)
        assert process is not None
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setresuid(65534, 65534, 65534)
                net_devices(PROCFS, process, key, arrays)
            except NetDeviceError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        said = os.read(reader, 4096).decode()
        os.close(reader)
        os.waitpid(child, 0)
    assert said == f"process {pid}: its memory cannot be read (no permission): grant railscope CAP_SYS_PTRACE"


SEGMENTS = (Segment(1, 5, 0, 0x1000, 0x800, 0x800, PAGE), Segment(1, 6, 0x800, 0x2800, 0x100, 0x900, PAGE))
ARRAYS = DeviceArrays(SEGMENTS, (DeviceArray(NetworkKind.SOCKET, 0x2840, 2, 56, 28, None, 0x2800),))


def recorded(procfs: Path) -> Path:
    """A procfs with process 42, which has the library's first byte at 0x1800: 0x800 from where it was linked."""
    folder = procfs / "42"
    folder.mkdir()
    (folder / "stat").write_text("42 (job) S 1 " + "0 " * 15 + "1 0 5 4096 " + "0 " * 20)
    (folder / "maps").write_text("1800-2800 r-xp 00000000 08:01 77 /usr/lib/libnccl.so.2\n")
    return folder


def line(start: int, offset: int, *, rights: str = "r-xp", file: FileKey = FILE) -> bytes:
    major, minor = file.device
    end = start + PAGE
    return f"{start:x}-{end:x} {rights} {offset:08x} {major:02x}:{minor:02x} {file.inode}   /lib/x y\n".encode()


CODE_LAST = (
    Segment(1, 4, 0, 0, 3 * PAGE, 3 * PAGE, PAGE),
    Segment(1, 5, 3 * PAGE + 0x40, 7 * PAGE + 0x40, 4 * PAGE, 4 * PAGE, PAGE),
    Segment(1, 6, 8 * PAGE, 20 * PAGE, PAGE, 9 * PAGE, PAGE),
)


@given(bias=st.integers(0, 1 << 34), split=st.integers(0, 4))
def test_the_bias_is_found_whichever_part_of_the_code_is_seen(bias: int, split: int) -> None:
    bias *= PAGE
    maps = line(bias, 0, rights="r--p") + line(bias + (7 + split) * PAGE, (3 + split) * PAGE)
    assert load_biases(maps, FILE, CODE_LAST) == {bias}


def test_a_mapping_that_was_split_has_one_bias() -> None:
    maps = b"".join(line((100 + 7 + part) * PAGE, (3 + part) * PAGE) for part in range(4))
    assert load_biases(maps, FILE, CODE_LAST) == {100 * PAGE}


def test_other_files_and_mappings_without_code_have_no_bias() -> None:
    other = line(107 * PAGE, 3 * PAGE, file=FileKey((8, 2), 77)) + line(107 * PAGE, 3 * PAGE, file=FileKey((8, 1), 78))
    data = line(120 * PAGE, 8 * PAGE, rights="rw-p") + line(107 * PAGE, 3 * PAGE, rights="r--p")
    assert load_biases(other + data, FILE, CODE_LAST) == set()


def test_a_library_that_is_loaded_twice_is_not_guessed_at(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    with (folder / "maps").open("a") as maps:
        maps.write("9800-a800 r-xp 00000000 08:01 77 /usr/lib/libnccl.so.2\n")
    with pytest.raises(NetDeviceError, match=r"^process 42: its NCCL library is loaded 2 times"):
        net_devices(tmp_path, ProcessIdentity(42, 5), FILE, ARRAYS)


@pytest.mark.parametrize(
    "name",
    [b"", b"a b", b"a/b", b"a:b", b".", b"..", b"caf\xc3\xa9", b"tab\t", b"\x7f", b"sixteen-letters-"],
    ids=repr,
)
def test_what_cannot_be_an_interface_has_no_name(name: bytes) -> None:
    content = (bytes(28) + name).ljust(56, b"\0") + (bytes(28) + b"eth1").ljust(56, b"\0")
    assert list(devices_in(content, SOCKETS)) == [NetDevice(NetworkKind.SOCKET, 1, "eth1", None)]


def test_a_name_that_does_not_end_is_no_name() -> None:
    assert list(devices_in(bytes(28) + b"e" * 28, SOCKETS)) == []
    assert list(devices_in((bytes(56) + b"\1" + bytes(31) + b"m" * 64).ljust(320, b"\0"), RDMA)) == []


@given(st.binary(max_size=2 * 320))
def test_whatever_the_bytes_a_name_is_one_that_the_kernel_could_give(content: bytes) -> None:
    for array, most in ((SOCKETS, 15), (RDMA, 63)):
        for device in devices_in(content, array):
            assert 0 < len(device.name) <= most
            assert device.name.isascii()
            assert device.name.isprintable()
            assert not set(device.name) & set(" /")
            assert (device.port is None) == (array is SOCKETS)
            assert device.port != 0


def test_every_known_build_has_the_layout_of_both_kinds() -> None:
    layouts = Layouts.load()
    builds = json.loads(TABLE.read_bytes())["builds"]
    assert len(builds) >= 79
    for build_id in builds:
        structures = layouts.structures(build_id)
        assert "devName" in structures["ncclNetSocketDev"].offsets
        if builds[build_id]["nccl_version"] >= "2.20":
            assert {"devName", "portNum"} <= structures["ncclIbDev"].offsets.keys()
