"""What goes wrong around the agent is one clear line, an exit status, and never a wrong number."""

from __future__ import annotations

import ctypes.util
import mmap
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabric.agent_process import RAILSCOPE, AgentProcess

pytestmark = pytest.mark.root

NO_PROCESS = str(2**22 - 1)
"""The highest pid there is, and never given to anyone here."""


def run(*arguments: str, unprivileged: bool = False) -> subprocess.CompletedProcess[str]:
    command = [str(RAILSCOPE), *arguments]
    if unprivileged:
        # Still user 0, so that a checkout in a private folder can be read, but with no capability left.
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def one_line(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    lines = ran.stderr.strip().splitlines()
    assert len(lines) == 1, ran.stderr
    return lines[0]


def test_an_unknown_option_is_named() -> None:
    assert "--web.listen-adress" in one_line(run("agent", "--web.listen-adress", ":9779"))


def test_a_missing_config_file_is_named() -> None:
    assert "/nowhere.yml" in one_line(run("agent", "--config.file", "/nowhere.yml"))


def test_a_config_file_with_an_unknown_key_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "railscope.yml"
    file.write_text("web:\n  listen-adress: :9779\n")
    line = one_line(run("agent", "--config.file", str(file)))
    assert str(file) in line
    assert "listen-adress" in line


def test_a_port_in_use_is_said_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = one_line(run("agent", "--web.listen-address", f"127.0.0.1:{taken.getsockname()[1]}"))
    assert "address already in use" in line
    assert "--web.listen-address" in line


def test_without_rights_the_agent_says_which_it_needs() -> None:
    line = one_line(run("agent", "--once", unprivileged=True))
    assert "CAP_BPF" in line


@pytest.mark.parametrize("once", [["--once"], []])
def test_a_pid_that_no_process_has_is_refused(once: list[str]) -> None:
    line = one_line(run("agent", *once, "--web.listen-address", "127.0.0.1:0", "--pid", NO_PROCESS))
    assert line.startswith(f"railscope: --pid: no process has the pid {NO_PROCESS}: ")


def test_a_process_without_nccl_is_one_warning(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as idle:
        try:
            ran = run("agent", "--once", "--path.sysfs", str(tmp_path), "--pid", str(idle.pid))
        finally:
            idle.kill()
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if "--pid" in line]
    assert "level=warning" in line
    assert f"no NCCL is mapped by pid {idle.pid}" in line


def test_a_mode_that_the_kernel_cannot_offer_is_refused() -> None:
    line = one_line(run("agent", "--once", "--probe.attach", "perf", "--probe.enqueue-time", "session"))
    assert "session" in line


def test_recorded_sysfs_is_read_instead_of_the_host_and_labelled_simulated(tmp_path: Path) -> None:
    device = tmp_path / "class/net/eth7/statistics"
    device.mkdir(parents=True)
    for name, bytes_so_far in (("tx_bytes", 700), ("rx_bytes", 900)):
        (device / name).write_text(f"{bytes_so_far}\n")
    for name, value in (("operstate", "up"), ("carrier", "1"), ("speed", "1000"), ("ifindex", "7"), ("type", "1")):
        (device.parent / name).write_text(f"{value}\n")
    ran = run("agent", "--once", "--once.settle", "300ms", "--path.sysfs", str(tmp_path), "--no-collector.collective")
    assert ran.returncode == 0, ran.stderr
    assert 'simulated="true"' in ran.stdout
    assert 'railscope_rail_info{rail="0",device="eth7"' in ran.stdout
    assert "eth0" not in ran.stdout


def test_a_truncated_library_that_a_process_maps_is_passed_over(tmp_path: Path) -> None:
    library = Path(ctypes.util.find_library("c") or "libc.so.6")
    whole = Path("/lib/x86_64-linux-gnu") / library
    broken = tmp_path / "libnccl.so.2"
    broken.write_bytes(whole.read_bytes()[:4096] + b"ncclAllReduce")
    with broken.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        try:
            with AgentProcess() as agent:
                assert agent.process.poll() is None
                libraries = {labels["library"] for labels, _ in agent.samples("railscope_probe_attached")}
                assert str(broken) not in libraries
                ((_, success),) = agent.samples("railscope_collector_success", collector="collective")
                assert success == 1
        finally:
            mapping.close()


def test_processes_that_come_and_go_while_the_agent_looks_do_it_no_harm() -> None:
    with AgentProcess("--probe.scan-interval", "1s") as agent:
        for _ in range(60):
            subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
        ((_, success),) = agent.samples("railscope_collector_success", collector="collective")
        assert success == 1
        assert agent.process.poll() is None


def test_the_agent_ends_at_once_when_told_to() -> None:
    with AgentProcess() as agent:
        agent.process.terminate()
        assert agent.process.wait(5) == 0
    assert not Path("/sys/fs/bpf/railscope").exists()
