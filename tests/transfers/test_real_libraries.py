"""The agent beside real transfers: what it counts is what the programs say they did, and a peer that stops is named."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from railscope.agent.imports.hang_command import diagnose_files
from railscope.testbed.hosts import Fabric, Host
from railscope.testbed.transfers.inference import Inference, InferenceReport, KvWrites
from railscope.testbed.transfers.library import GLOO, PERFTEST, REPOSITORY, WHEELS
from tests.fabric.agent_process import AgentProcess
from tests.transfers.perftest import Perftest
from tests.waiting import eventually

pytestmark = pytest.mark.root

with_nixl = pytest.mark.skipif(
    not (WHEELS / "nixl_cu12").exists(), reason="NIXL is not there for this Python: run make .venv/.stamps/transfers"
)
with_mooncake = pytest.mark.skipif(
    not (WHEELS / "mooncake").exists(), reason="Mooncake is not there for this Python: run make .venv/.stamps/transfers"
)
with_ucx = pytest.mark.skipif(not PERFTEST.exists(), reason="UCX is not there: run make .venv/.stamps/transfers")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with Fabric(hosts=2, rails=1) as fabric:
        first, second = fabric.hosts
        yield first, second


def totals(agent: AgentProcess, what: str) -> dict[tuple[str, str], int]:
    """By library and operation."""
    samples = agent.samples(f"railscope_transfer_{what}")
    return {(labels["library"], labels["op"]): int(value) for labels, value in samples}


def attached(agent: AgentProcess) -> set[str]:
    """Libraries with probes on them."""
    return {labels["library"] for labels, on in agent.samples("railscope_transfer_probe_attached") if on}


@with_nixl
def test_what_nixl_moved_through_ucx_counts_once_and_a_peer_that_stops_is_named(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    requests = 30
    with ExitStack() as stack:
        inference = stack.enter_context(Inference(hosts, requests=requests, pause_s=0))
        inference.await_ready(60)
        prefill, decode = inference.processes["prefill-0"], inference.processes["decode-0"]
        pids = [word for pid in inference.pids for word in ("--pid", str(pid))]
        agent = stack.enter_context(
            AgentProcess(*pids, "--stall.after", "3s", "--series.peers", "8", "--recordings.directory", str(tmp_path))
        )
        agent.until(lambda: attached(agent) == {"ucx", "nixl"})
        os.kill(decode, signal.SIGSTOP)
        inference.release()
        agent.until(lambda: [one["cause"] for one in agent.stalls()] == ["process_stopped"])
        (stall,) = agent.stalls()
        agent.until(lambda: any(tmp_path.glob("railscope-*.npz")))
        ((labels, age),) = agent.samples("railscope_transfer_inflight_seconds", library="nixl")
        os.kill(decode, signal.SIGCONT)
        inference.await_written(60)
        agent.until(lambda: agent.stalls() == [])
        report = inference.end(60)
        operations, payload = totals(agent, "operations_total"), totals(agent, "payload_bytes_total")
        completed = totals(agent, "seconds_count")
    assert report == InferenceReport((KvWrites("prefill-0", prefill, "decode-0", requests, requests << 20),), True)
    assert (stall["library"], stall["op"], stall["peer"], stall["pid"]) == ("nixl", "nixl Write", "decode-0", prefill)
    assert f"process {decode} is stopped" in stall["evidence"][0]
    assert stall["blamed_pid"] == decode
    assert any(hosts[1].addresses[0] in sentence for sentence in stall["evidence"])
    (recorded,) = diagnose_files(list(tmp_path.glob("railscope-*.npz"))).findings
    assert f"nixl Write of process {prefill} on " in recorded.headline
    assert recorded.headline.endswith(f": the process at its other end (pid {decode}) is stopped.")
    assert f"kill -CONT {decode}" in [step.command for step in recorded.next_steps]
    assert (labels["peer"], labels["pid"], age > 3) == ("decode-0", str(prefill), True)
    assert operations.pop(("nixl", "Write")) == completed["nixl", "Write"] == requests
    assert payload.pop(("nixl", "Write")) == requests << 20
    # What is left are UCX's own: no payload of a transfer is among them.
    assert sum(payload.values()) < 1 << 20


@with_ucx
def test_a_message_of_ucx_whose_receiver_stops_names_its_address_and_process(hosts: tuple[Host, Host]) -> None:
    with ExitStack() as stack:
        bench = stack.enter_context(Perftest(hosts[1], hosts[0], 0, messages=1_000_000, size_bytes=1 << 20))
        receiver, sender = bench.pids
        pids = [word for pid in bench.pids for word in ("--pid", str(pid))]
        agent = stack.enter_context(AgentProcess(*pids, "--stall.after", "3s"))
        bench.start()
        agent.until(lambda: totals(agent, "operations_total").get(("ucx", "TagSend"), 0) > 0)
        os.kill(receiver, signal.SIGSTOP)
        agent.until(lambda: any(one["cause"] == "process_stopped" for one in agent.stalls()))
        stall = next(one for one in agent.stalls() if one["cause"] == "process_stopped")
        stuck = agent.samples("railscope_transfer_stalled_seconds", library="ucx", pid=str(sender))
        os.kill(receiver, signal.SIGCONT)
        agent.until(lambda: agent.stalls() == [])
    assert (stall["library"], stall["pid"], stall["blamed_pid"]) == ("ucx", sender, receiver)
    assert stall["peer"].startswith(hosts[1].addresses[0])
    assert stuck[0][0]["blamed_pid"] == str(receiver)


@contextmanager
def running(host: Host, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        host.command(*command), stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment}, cwd=REPOSITORY,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def owned(agent: AgentProcess, host: Host, owner: str) -> dict[str, float]:
    """An owner's bytes on a host's rail, by direction."""
    return {
        labels["direction"]: value
        for labels, value in agent.samples("railscope_rail_bytes_by_owner_total", owner=owner)
        if labels["netns"] == host.namespace
    }


@contextmanager
def mooncake(hosts: tuple[Host, Host], folder: Path, blocks: int, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Who gives, and who takes; both are ready."""
    with ExitStack() as stack:
        ends = [
            stack.enter_context(
                running(
                    host, sys.executable, "-m", "tests.transfers.mooncake_ends", who, str(folder), host.addresses[0],
                    str(blocks), str(size), PYTHONPATH=f"{WHEELS}:{REPOSITORY}",
                )
            )
            for who, host in zip(("give", "take"), hosts, strict=True)
        ]  # fmt: skip
        eventually((folder / "ready").exists)
        yield ends


@with_mooncake
def test_what_mooncake_wrote_is_counted_and_its_own_on_the_rail(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Also of a batch of more requests than a process makes at once elsewhere."""
    blocks, size = 100, 1 << 20
    each = size // blocks
    total = blocks * (size + each)
    with mooncake(hosts, tmp_path, blocks, size) as ends:
        pids = [word for one in ends for word in ("--pid", str(one.pid))]
        with AgentProcess(*pids) as agent:
            agent.until(lambda: attached(agent) == {"mooncake"} and bool(owned_rails(agent)))
            (tmp_path / "go").touch()
            (tmp_path / "batch").touch()
            eventually((tmp_path / "done").exists)
            agent.until(lambda: owned(agent, hosts[0], "mooncake").get("transmit", 0) >= total)
            operations, payload = totals(agent, "operations_total"), totals(agent, "payload_bytes_total")
            completed, unsized = totals(agent, "seconds_count"), totals(agent, "unsized_total")
            moved = owned(agent, hosts[0], "mooncake")
        (tmp_path / "end").touch()
        said = [one.communicate(timeout=60)[0].splitlines()[-1] for one in ends]
    assert said == [f"wrote {blocks} of {size} and {blocks} of {each}", "right"]
    assert operations["mooncake", "Write"] == completed["mooncake", "Write"] == blocks + 1
    assert payload["mooncake", "Write"] == total
    assert unsized.get(("mooncake", "Write"), 0) == 0
    assert moved["transmit"] < 1.05 * total


@with_mooncake
def test_a_batch_of_mooncake_whose_taker_stops_is_a_stall(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    blocks, size = 100, 64 << 20
    with mooncake(hosts, tmp_path, blocks, size) as ends:
        give, take = (one.pid for one in ends)
        with AgentProcess("--pid", str(give), "--pid", str(take), "--stall.after", "3s", "--budget", "100%") as agent:
            agent.until(lambda: attached(agent) == {"mooncake"})
            (tmp_path / "go").touch()
            eventually((tmp_path / "singles").exists)
            assert agent.stalls() == []
            os.kill(take, signal.SIGSTOP)
            (tmp_path / "batch").touch()
            agent.until(lambda: len(agent.stalls()) > 0)
            (stall,) = agent.stalls()
            os.kill(take, signal.SIGCONT)
            agent.until(lambda: agent.stalls() == [])
        (tmp_path / "end").touch()
    assert (stall["library"], stall["op"], stall["pid"]) == ("mooncake", "mooncake Write", give)
    # Nobody has taken the batch's connections yet, so that no process is known to hold their other ends.
    assert (stall["cause"], stall["payload_bytes"]) == ("transfer_stuck", size // blocks * blocks)
    assert stall["peer"].startswith(hosts[1].addresses[0])


def owned_rails(agent: AgentProcess) -> list[tuple[dict[str, str], float]]:
    return agent.samples("railscope_rail_bytes_by_origin_total")


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of the real Gloo."""
    if not GLOO.exists() or shutil.which("g++") is None:
        pytest.skip("Gloo or g++ is not there: install g++ and run make .venv/.stamps/transfers")
    program = tmp_path_factory.mktemp("gloo") / "gloo_ends"
    source = Path(__file__).with_name("gloo_ends.cpp")
    command = ["g++", "-O1", "-std=c++17", f"-I{GLOO}/include", str(source), "-o", str(program), f"-L{GLOO}/lib"]
    subprocess.run([*command, "-lgloo", "-Wl,--allow-shlib-undefined", "-pthread"], check=True)
    return program


def test_what_gloo_reduced_is_counted_where_it_sends_it(hosts: tuple[Host, Host], gloo: Path, tmp_path: Path) -> None:
    elements, rounds = 1 << 18, 40
    libraries = f"{GLOO}/lib:{GLOO}/lib/{platform.machine()}-linux-gnu"
    with ExitStack() as stack:
        ends = [
            stack.enter_context(
                running(
                    host, str(gloo), str(rank), "2", str(tmp_path), host.addresses[0], str(elements), str(rounds),
                    LD_LIBRARY_PATH=libraries,
                )
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        eventually(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        pids = [word for one in ends for word in ("--pid", str(one.pid))]
        agent = stack.enter_context(AgentProcess(*pids, "--series.peers", "8"))
        agent.until(lambda: attached(agent) == {"gloo"} and bool(owned_rails(agent)))
        (tmp_path / "go").touch()
        eventually(lambda: all((tmp_path / f"done{rank}").exists() for rank in (0, 1)))
        agent.until(lambda: owned(agent, hosts[0], "gloo").get("transmit", 0) >= rounds * elements * 4)
        operations, payload = totals(agent, "operations_total"), totals(agent, "payload_bytes_total")
        moved = owned(agent, hosts[0], "gloo")
        (tmp_path / "end").touch()
        said = [float(one.communicate(timeout=60)[0]) for one in ends]
    assert said == [float(2**rounds)] * 2
    assert operations["gloo", "AllReduce"] == 2 * rounds
    # A ring of two sends half of it twice.
    assert payload["gloo", "Send"] == 2 * rounds * elements * 4
    for direction in ("transmit", "receive"):
        assert moved[direction] == pytest.approx(rounds * elements * 4, rel=0.05)
