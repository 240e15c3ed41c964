"""`railscope demo` as a newcomer meets it: the real NCCL on the stand-in for CUDA, and a fault that it names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from railscope.testbed.nccl.build import Double
from railscope.testbed.transfers.library import WHEELS
from tests.fabric.agent_process import RAILSCOPE
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

with_nixl = pytest.mark.skipif(
    not (WHEELS / "nixl_cu12").exists(), reason="NIXL is not there for this Python: run make .venv/.stamps/transfers"
)
DEMO = (str(RAILSCOPE), "demo", "--library", "nccl")


def run(*arguments: str) -> Any:
    """What a demo says with --json."""
    ran = subprocess.run([*DEMO, "--json", *arguments], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def test_the_demo_shows_completion_rails_and_every_call_of_nccl_and_the_report_knows_latencies(
    double: Double, tmp_path: Path
) -> None:
    assert double.workload.is_file()
    result = run("--seconds", "6", "--record", str(tmp_path / "dataset"))
    assert result["library"].startswith("nccl ")
    assert (result["ok"], result["verified"]) == (True, True)
    assert result["jobs"] == result["observed"]
    made = {op for rank in result["jobs"] for op in rank["ops"]}
    assert made >= {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AllToAll", "Send", "Recv"}
    completed = {one["op"]: one for one in result["completions"]}
    assert completed.keys() >= {"AllReduce", "AllGather", "ReduceScatter", "Broadcast"}
    assert all(one["mean_seconds"] > 0 and one["bus_bytes_per_second"] > 0 for one in completed.values())
    for rail in result["rails"]:
        if rail["direction"] == "transmit":
            # What NCCL handed over, and headers and acknowledgements, left the device.
            assert 0.5 * rail["port_bytes"] < rail["collective_bytes"] < rail["port_bytes"]
    command = [str(RAILSCOPE), "report", str(tmp_path / "dataset"), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert {row["op"] for row in report["latency"]["rows"]} >= completed.keys()
    assert report["bandwidth"]


def test_a_stopped_rank_is_the_verdict_that_the_demo_ends_with(double: Double) -> None:
    assert double.workload.is_file()
    ran = subprocess.run([*DEMO, "--seconds", "4", "--fault", "stall"], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout.partition("is stopped: kill -STOP")[2]
    assert " s after it was broken:" in said
    assert "cause process_stopped, blames rank 1" in said
    assert "evidence: " in said
    assert "kill -CONT" in said


@with_nixl
def test_a_disaggregated_inference_beside_the_job_is_counted_write_by_write_and_recorded(
    double: Double, tmp_path: Path
) -> None:
    assert double.workload.is_file()
    result = run("--seconds", "6", "--pattern", "disaggregated", "--record", str(tmp_path / "dataset"))
    assert result["ok"]
    assert result["transfers"] == result["observed_transfers"]
    (pair,) = result["transfers"]
    assert (pair["prefill"], pair["decode"], pair["payload_bytes"]) == (
        "prefill-0", "decode-0", pair["operations"] << 20
    )  # fmt: skip
    assert pair["operations"] > 0
    assert result["jobs"] == result["observed"]
    command = [str(RAILSCOPE), "report", str(tmp_path / "dataset"), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    (told,) = [one for one in report["transfers"] if one["library"] == "nixl"]
    assert (told["pid"], told["op"], told["peer"]) == (pair["pid"], "Write", "decode-0")
    assert (told["operations"], told["payload_bytes"]) == (pair["operations"], pair["payload_bytes"])
    assert 0 < told["p50_seconds"] <= told["p99_seconds"]
    assert told["server"] in {gpu["server"] for gpu in report["gpus"]}


def test_a_rail_is_slow_for_a_job_that_sends_little_too(double: Double) -> None:
    assert double.workload.is_file()
    arguments = ("--pattern", "inference", "--seconds", "6", "--fault", "slow-rail")
    ran = subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "cause rail_slow, blames rail 1 (rail1 in " in ran.stdout


@with_nixl
def test_a_stopped_decode_process_is_the_verdict_that_the_demo_ends_with(double: Double) -> None:
    assert double.workload.is_file()
    arguments = ("--pattern", "disaggregated", "--seconds", "8", "--fault", "stall")
    ran = subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    before, _, said = ran.stdout.partition("to which KV caches are written, is stopped: kill -STOP")
    decode = said.split()[0]
    assert "the real NIXL 1." in before
    assert re.search(r"nixl prefill-0 \(pid \d+\) → decode-0: [\d,]+ writes/s", before), before
    owners = re.findall(r"host0 rail\d: sent by (.*)", before)
    assert any("nixl" in line and "nccl" in line for line in owners), before
    assert re.search(r"process \d+: stalled in nixl Write of 1.05 MB to decode-0 for", said), said
    assert f"cause process_stopped, blames process {decode}" in said
    assert f"kill -CONT {decode}" in said


@with_nixl
def test_ctrl_c_ends_a_demo_with_an_inference_beside_it_though_all_processes_get_the_signal() -> None:
    command = [*DEMO, "--pattern", "disaggregated", "--keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        try:
            assert demo.stdout is not None
            lines = (line.split() for line in demo.stdout)
            page = next(words[2] for words in lines if words[:1] == ["curl"] and "/stalls" in words[2])
            eventually(lambda: makes_calls(page.replace("/stalls", "/metrics")))
            rails = of_rails(page.replace("/stalls", "/metrics"))
            os.killpg(demo.pid, signal.SIGINT)
            rest, _ = demo.communicate(timeout=60)
        finally:
            demo.kill()
    assert demo.returncode == 0, rest
    assert len(rails) == 4, "two of each host, and no device of this machine"
    assert all("railscope-" in one for one in rails)


def of_rails(url: str) -> list[str]:
    """The series that tell which rails there are."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return re.findall(r"^railscope_rail_info\{(.*)\} 1$", answer.read().decode(), re.MULTILINE)


def makes_calls(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return re.search(rb"^railscope_collective_calls_total\{.* [1-9]", answer.read(), re.MULTILINE) is not None


def test_a_demo_that_is_kept_answers_like_an_agent_until_it_is_interrupted(double: Double) -> None:
    assert double.workload.is_file()
    demo = subprocess.Popen([*DEMO, "--seconds", "2", "--fault", "stall", "--keep"], stdout=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        address = ""
        for line in demo.stdout:
            if line.strip().startswith("curl") and "/stalls" in line:
                address = line.split()[2]
            if line.startswith("Something is broken now"):
                break
        deadline = time.monotonic() + 60
        stalls: list[dict[str, Any]] = []
        while not any(one["cause"] == "process_stopped" for one in stalls):
            assert time.monotonic() < deadline, stalls
            with urllib.request.urlopen(address, timeout=10) as answer:
                stalls = json.load(answer)["stalls"]
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    (stopped,) = [one for one in stalls if one["cause"] == "process_stopped"]
    assert demo.returncode == 0
    assert f"rank {stopped['rank']} (pid {stopped['pid']}, on host" in rest
