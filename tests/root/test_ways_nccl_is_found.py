"""The agent finds NCCL however it comes into a process, counts its calls once, and says what it does not know."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.config.options import Config
from railscope.agent.doctor.command import run_doctor
from railscope.probes.nccl.abi import DATA_TYPE_BYTES
from railscope.testbed.job import LIBRARY as TESTBED_LIBRARY
from railscope.testbed.nccl.library import NCCL_VERSION, nccl_library
from tests.fabric.agent_process import AgentProcess
from tests.root.caller import Caller
from tests.root.nccl_variants import (
    COUNT,
    FLOAT32,
    HASH,
    RANK,
    RANKS,
    LateCaller,
    Program,
    layout_sources,
    library,
    log_of,
    probed,
    program,
    totals,
)
from tests.root.probe_targets import assemble, on_x86_64
from tests.root.test_programs_arguments import COMM, REAL_CALLS

pytestmark = pytest.mark.root


@contextmanager
def agent_for(*pids: int) -> Iterator[AgentProcess]:
    """An agent that counts these processes only."""
    with AgentProcess(*(word for pid in pids for word in ("--pid", str(pid)))) as agent:
        yield agent


def communicators(agent: AgentProcess) -> dict[str, dict[str, str]]:
    """The labels of the one communicator of each process."""
    return {labels["pid"]: labels for labels, _ in agent.samples("railscope_comm_info")}


def doctors_report(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the doctor says of one library: its report and its finding."""
    out = io.StringIO()
    run_doctor(Config(), as_json=True, out=out)
    found = json.loads(out.getvalue())
    (report,) = [report for report in found["libraries"] if report["path"] == str(path)]
    (finding,) = [finding for finding in found["findings"] if finding["what"].startswith(f"{path}: ")]
    return report, finding


@pytest.mark.parametrize("flags", [("-no-pie",), ("-pie", "-fPIE")], ids=["at-fixed-address", "position-independent"])
def test_nccl_linked_into_a_program_is_found_by_names_that_are_not_exported(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    trainer = program(tmp_path / "trainer", *flags)
    dynamic = subprocess.run(["nm", "-D", "--defined-only", trainer], check=True, capture_output=True, text=True).stdout
    assert "nccl" not in dynamic
    with Program([trainer]) as job, agent_for(job.pid) as agent:
        assert probed(agent, tmp_path) == {str(trainer): "2.99.1"}
        job.call(25)
        assert totals(agent) == {"AllReduce": (25, 25 * 4 * COUNT)}
        seen = communicators(agent)[str(job.pid)]
    assert (seen["comm"], seen["rank"], seen["nranks"], seen["nccl_version"]) == (HASH, RANK, RANKS, "2.99.1")


def test_nccl_hidden_inside_a_framework_is_found(tmp_path: Path) -> None:
    framework = library(tmp_path / "libframework.so", "-fvisibility=hidden")
    with Caller(framework) as job, agent_for(job.pid) as agent:
        assert probed(agent, tmp_path) == {str(framework): "2.99.1"}
        job.call("framework_step", 1, 40)
        assert totals(agent) == {"AllReduce": (40, 40 * 4 * COUNT)}
        assert communicators(agent)[str(job.pid)]["comm"] == HASH


@pytest.mark.nccl
def test_calls_with_a_config_are_counted_once_with_their_operation_and_bytes() -> None:
    with Caller(nccl_library()) as job, agent_for(job.pid) as agent:
        comm = job.memory(2 << 20)  # without magics: refused once it has been counted
        expected: dict[str, tuple[int, int]] = {}
        # Each operation so often that no other has the same number
        for times, call in enumerate([c for c in REAL_CALLS if c.function.endswith("Config")], start=1):
            job.call(call.function, times, *(comm if word == COMM else word for word in call.words))
            expected[call.op.name] = (times, times * call.count * DATA_TYPE_BYTES[call.data_type])
        assert len(expected) == 8
        assert totals(agent) == expected


@pytest.mark.nccl
def test_two_versions_of_nccl_at_once_keep_their_names_layouts_and_counts(tmp_path: Path) -> None:
    other = Path(shutil.copy(TESTBED_LIBRARY, tmp_path))
    third = library(tmp_path / "libnccl.so.2", version="2.97.3")
    with ExitStack() as stack:
        real, mine, small = (stack.enter_context(Caller(path)) for path in (nccl_library(), other, third))
        agent = stack.enter_context(agent_for(real.pid, mine.pid, small.pid))
        sources = layout_sources(agent)
        assert [sources[str(path)] for path in (nccl_library(), other, third)] == ["build-id", "dwarf", "accessors"]
        comm = mine.new_communicator()
        buffer = mine.memory(4096)
        real.call("ncclBroadcast", 11, 0, 0, COUNT, FLOAT32, 0, 0, 0)
        assert mine.call("ncclAllGather", 22, buffer, buffer, COUNT, FLOAT32, comm, 7) == 0
        small.call("framework_step", 1, 33)
        assert totals(agent) == {
            "Broadcast": (11, 11 * 4 * COUNT),
            "AllGather": (22, 22 * 4 * COUNT),
            "AllReduce": (33, 33 * 4 * COUNT),
        }
        seen = communicators(agent)
    assert seen[str(real.pid)]["nccl_version"] == NCCL_VERSION
    assert seen[str(small.pid)]["nccl_version"] == "2.97.3"
    assert seen[str(mine.pid)]["nccl_version"] not in (NCCL_VERSION, "2.97.3")
    assert seen[str(small.pid)]["comm"] == HASH
    assert seen[str(mine.pid)]["nranks"] == "1"


def test_rccl_is_counted_by_its_own_names_and_its_unknown_struct_gives_no_identity(tmp_path: Path) -> None:
    rccl = library(tmp_path / "librccl.so.1", "-DRCCL", "-DMAGIC=0")
    with LateCaller() as job, agent_for(job.pid) as agent:
        job.load(rccl)
        agent.until(lambda: list(probed(agent, tmp_path)) == [str(rccl)])
        world = job.world()
        job.call("ncclAllToAll", 5, 0, 0, COUNT, FLOAT32, world, 0)
        job.call("ncclAllToAllv", 7, 0, 0, 0, 0, 0, 0, FLOAT32, world, 0)
        job.step(9)
        # The counts of AllToAllv are arrays in the job's memory: its calls are known, its bytes are not.
        assert totals(agent) == {"AllToAll": (12, 5 * 4 * COUNT), "AllReduce": (9, 9 * 4 * COUNT)}
        seen = communicators(agent)[str(job.pid)]
        assert (seen["comm"], seen["rank"], seen["nranks"]) == ("unknown", "unknown", "unknown")
        assert (seen["identity_source"], seen["nccl_version"]) == ("unknown", "unknown")


def test_a_library_that_is_replaced_is_observed_beside_its_successor(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2", version="2.90.1")
    with Caller(path) as running, LateCaller() as new, agent_for(running.pid, new.pid) as agent:
        running.call("framework_step", 1, 3)
        library(tmp_path / "next", version="2.91.2").rename(path)
        new.load(path)
        agent.until(lambda: probed(agent, tmp_path) == {f"{path} (deleted)": "2.90.1", str(path): "2.91.2"})
        running.call("framework_step", 1, 4)
        new.step(50)
        assert totals(agent) == {"AllReduce": (57, 57 * 4 * COUNT)}
        versions = {pid: labels["nccl_version"] for pid, labels in communicators(agent).items()}
    assert versions == {str(running.pid): "2.90.1", str(new.pid): "2.91.2"}


def test_a_library_that_was_deleted_before_the_agent_came_is_observed(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    with Caller(path) as job:
        path.unlink()
        with agent_for(job.pid) as agent:
            assert list(probed(agent, tmp_path)) == [f"{path} (deleted)"]
            job.call("framework_step", 1, 6)
            assert totals(agent) == {"AllReduce": (6, 6 * 4 * COUNT)}


def image(folder: Path) -> Path:
    """A container's image: a trainer, NCCL as a library, and what the dynamic linker needs."""
    root = folder / "image"
    for place in ("opt", "proc", "tmp"):
        (root / place).mkdir(parents=True)
    library(root / "opt/libnccl.so.2", "-Wl,-soname,libnccl.so.2")
    (root / "trainer.c").write_text(
        '#include <stdio.h>\nint framework_step(int);\nint main(void) { int times; puts("ready"); fflush(stdout);\n'
        'while (scanf("%d", &times) == 1) { framework_step(times); puts("done"); fflush(stdout); } return 0; }\n'
    )
    sources = ("trainer.c", "opt/libnccl.so.2")
    command = ["gcc", "-o", str(root / "trainer"), *(str(root / name) for name in sources), "-Wl,-rpath,/opt"]
    subprocess.run(command, check=True)
    listing = subprocess.run(["ldd", "/bin/true"], check=True, capture_output=True, text=True).stdout
    for path in (Path(word) for word in listing.split() if word.startswith("/")):
        (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path.relative_to("/"))
    return root


@contextmanager
def container(lower: Path, folder: Path, prepare: str = "true", options: str = "") -> Iterator[Program]:
    """The image's trainer with mounts, pids and a network of its own, on an overlay that only it sees."""
    for name in ("upper", "work", "merged"):
        (folder / name).mkdir(parents=True)
    layers = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work{options}"
    script = f"mount -t overlay overlay -o {layers} merged && cd merged && {prepare} && exec chroot . /trainer"
    unshare = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
    with Program([*unshare, "sh", "-c", f"cd {folder} && {script}"]) as job:
        assert not list((folder / "merged").iterdir()), "the host sees nothing of the container's files"
        yield job


def test_jobs_in_containers_are_counted_once_although_they_share_a_layer_with_a_job_outside(tmp_path: Path) -> None:
    lower = image(tmp_path)
    with ExitStack() as stack:
        one, two = (stack.enter_context(container(lower, tmp_path / name)) for name in ("one", "two"))
        outside = stack.enter_context(Caller(lower / "opt/libnccl.so.2"))
        assert Path(f"/proc/{one.pid}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[1:] == ["1"]
        agent = stack.enter_context(agent_for(one.pid, two.pid, outside.pid))
        one.call(10)
        two.call(20)
        outside.call("framework_step", 1, 30)
        assert totals(agent) == {"AllReduce": (60, 60 * 4 * COUNT)}
        attached = [path for path in layout_sources(agent) if path.endswith("libnccl.so.2")]
        seen = communicators(agent)
    assert len(attached) == 1, "one file on disk, one attachment"
    assert set(seen) == {str(one.pid), str(two.pid), str(outside.pid)}, "pids as the host has them"
    assert {labels["comm"].partition("~")[0] for labels in seen.values()} == {HASH}
    assert [labels["comm"] for labels in seen.values()].count(HASH) == 1, "all three say the same hash and rank"


@pytest.mark.parametrize(
    ("options", "files"), [(",metacopy=off", 2), (",metacopy=on", 1)], ids=["copied-up", "rights-copied-up"]
)
def test_a_library_that_a_container_changed_is_another_file_only_if_its_code_is(
    tmp_path: Path, options: str, files: int
) -> None:
    lower = image(tmp_path)
    with ExitStack() as stack:
        outside = stack.enter_context(Caller(lower / "opt/libnccl.so.2"))
        changed = container(lower, tmp_path / "changed", "chmod 700 opt/libnccl.so.2", options)
        inside = stack.enter_context(changed)
        agent = stack.enter_context(agent_for(inside.pid, outside.pid))
        inside.call(10)
        outside.call("framework_step", 1, 30)
        assert totals(agent) == {"AllReduce": (40, 40 * 4 * COUNT)}
        attached = [path for path in layout_sources(agent) if path.endswith("libnccl.so.2")]
    assert len(attached) == files


def test_a_stripped_library_is_counted_through_its_exported_functions_and_the_agent_says_so(tmp_path: Path) -> None:
    stripped = library(tmp_path / "libnccl.so.2", "-s")
    sections = subprocess.run(["readelf", "-SW", stripped], check=True, capture_output=True, text=True).stdout
    assert ".symtab" not in sections
    with Caller(stripped) as job:
        report, finding = doctors_report(stripped)
        with agent_for(job.pid) as agent:
            job.call("framework_step", 1, 12)
            job.call("ncclReduceConfig", 5, 0, 0, COUNT, FLOAT32, 0, 2, 0, 0, 0)
            assert totals(agent) == {"AllReduce": (12, 12 * 4 * COUNT), "Reduce": (5, 5 * 4 * COUNT)}
            assert HASH in {labels["comm"] for labels, _ in agent.samples("railscope_comm_info", pid=str(job.pid))}
            assert layout_sources(agent)[str(stripped)] == "accessors"
            said = log_of(agent)
    assert f"attached to {stripped}: NCCL 2.99.1, through the exported functions, layout accessors" in said
    assert (report["through"], report["layout_source"]) == ("exported functions", "accessors")
    assert "through exported functions, communicators' layout from accessors" in finding["what"]


def test_what_stands_before_the_rank_is_no_name_unless_the_collectives_hand_it_on(tmp_path: Path) -> None:
    with Caller(library(tmp_path / "libnccl.so.2", "-DFIELD_BEFORE_RANK")) as job, agent_for(job.pid) as agent:
        job.call("framework_step", 1, 12)
        assert totals(agent) == {"AllReduce": (12, 12 * 4 * COUNT)}
        seen = communicators(agent)[str(job.pid)]
    assert (seen["comm"], seen["rank"], seen["nranks"]) == ("unknown", RANK, RANKS)


@on_x86_64
def test_without_any_layout_calls_are_counted_and_what_is_not_probed_is_named(tmp_path: Path) -> None:
    bare = assemble(
        tmp_path,
        ncclAllReduce="movabs $0x1234567890, %rax; push %rbp; pop %rbp; xor %eax, %eax; ret",
        ncclSend="mov %rsi, %rdi; push %rbp; pop %rbp; xor %eax, %eax; ret",
    )
    with Caller(bare) as job:
        report, finding = doctors_report(bare)
        with agent_for(job.pid) as agent:
            comm = job.memory(4096)
            job.call("ncclAllReduce", 8, 0, 0, COUNT, FLOAT32, 0, comm, 0)
            job.call("ncclSend", 8, 0, COUNT, FLOAT32, 1, comm, 0)
            assert totals(agent) == {"AllReduce": (8, 8 * 4 * COUNT)}
            assert communicators(agent)[str(job.pid)]["comm"] == "unknown"
            assert layout_sources(agent)[str(bare)] == "unknown"
            said = log_of(agent)
    assert f"{bare}: ncclSend is not probed: its first instructions would be single-stepped" in said
    assert "layout unknown: communicators have no identity" in said
    assert (report["layout_source"], report["refused_functions"]) == ("unknown", ["ncclSend"])
    assert finding["status"] == "note"


def test_a_library_that_is_loaded_late_and_closed_again_is_probed_while_it_is_mapped(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    with (
        LateCaller() as job,
        AgentProcess("--pid", str(job.pid), "--probe.scan-interval", "1s", "--probe.linger", "0s") as agent,
    ):
        assert probed(agent, tmp_path) == {}
        for total in (5, 10):
            job.load(path)
            agent.until(lambda: list(probed(agent, tmp_path)) == [str(path)])
            job.step(5)
            assert totals(agent) == {"AllReduce": (total, total * 4 * COUNT)}
            job.unload()
            assert str(path) not in Path(f"/proc/{job.pid}/maps").read_text()
            # Only a scan sees it, and scans are rarer where they take long: on a busy host.
            agent.until(lambda: probed(agent, tmp_path) == {}, seconds=80)
        assert totals(agent) == {"AllReduce": (10, 10 * 4 * COUNT)}, "counts stay"


def test_a_file_that_becomes_nccl_while_it_is_mapped_is_found_in_its_next_mapper(tmp_path: Path) -> None:
    path = tmp_path / "libplugin.so"
    (tmp_path / "plain.c").write_text("int plain(void) { return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, tmp_path / "plain.c"], check=True)
    content = library(tmp_path / "new").read_bytes()
    with Caller(path) as first, LateCaller() as second, agent_for(first.pid, second.pid) as agent:
        assert probed(agent, tmp_path) == {}
        with path.open("r+b") as file:
            file.write(content)
        second.load(path)
        agent.until(lambda: list(probed(agent, tmp_path)) == [str(path)])
        second.step(6)
        assert totals(agent) == {"AllReduce": (6, 6 * 4 * COUNT)}
