"""The agent beside real transfers: what it counts is what the programs say they did, and a peer that stops is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from railscope.testbed.hosts import Fabric, Host
from tests.fabric.agent_process import AgentProcess
from tests.transfers.perftest import WHEELS
from tests.waiting import eventually

pytestmark = pytest.mark.root

SIZE: Final = 1 << 20

with_nixl = pytest.mark.skipif(
    not (WHEELS / "nixl_cu12").exists(), reason="NIXL is not there for this Python: run make .venv/.stamps/transfers"
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with Fabric(hosts=2, rails=1) as fabric:
        first, second = fabric.hosts
        yield first, second


@contextmanager
def running(host: Host, *command: str) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "UCX_TLS": "tcp,self",
        "PYTHONPATH": str(WHEELS),
    }
    process = subprocess.Popen(
        host.command(*command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kv_cache(host: Host, who: str, folder: Path, blocks: int) -> Any:
    program = str(Path(__file__).with_name("kv_cache.py"))
    return running(host, sys.executable, program, who, str(folder), str(blocks), str(SIZE))


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
    blocks = 30
    with ExitStack() as stack:
        decode = stack.enter_context(kv_cache(hosts[1], "decode", tmp_path, blocks))
        prefill = stack.enter_context(kv_cache(hosts[0], "prefill", tmp_path, blocks))
        eventually((tmp_path / "ready").exists)
        pids = [word for one in (prefill, decode) for word in ("--pid", str(one.pid))]
        agent = stack.enter_context(AgentProcess(*pids, "--stall.after", "3s", "--series.peers", "8"))
        agent.until(lambda: attached(agent) == {"ucx", "nixl"})
        decode.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        agent.until(lambda: [one["cause"] for one in agent.stalls()] == ["process_stopped"])
        (stall,) = agent.stalls()
        ((labels, age),) = agent.samples("railscope_transfer_inflight_seconds", library="nixl")
        decode.send_signal(signal.SIGCONT)
        eventually((tmp_path / "done").exists)
        agent.until(lambda: agent.stalls() == [])
        (tmp_path / "end").touch()
        said = [process.communicate(timeout=60)[0].splitlines()[-1] for process in (prefill, decode)]
        operations, payload = totals(agent, "operations_total"), totals(agent, "payload_bytes_total")
        completed = totals(agent, "seconds_count")
    assert said == [f"wrote {blocks} of {SIZE}", "right"]
    assert (stall["library"], stall["op"], stall["peer"], stall["pid"]) == ("nixl", "nixl Write", "decode", prefill.pid)
    assert f"process {decode.pid} is stopped" in stall["evidence"][0]
    assert any(hosts[1].addresses[0] in sentence for sentence in stall["evidence"])
    assert (labels["peer"], labels["pid"], age > 3) == ("decode", str(prefill.pid), True)
    assert operations.pop(("nixl", "Write")) == completed["nixl", "Write"] == blocks
    assert payload.pop(("nixl", "Write")) == blocks * SIZE
    # What is left are UCX's own: no payload of a transfer is among them.
    assert sum(payload.values()) < SIZE
