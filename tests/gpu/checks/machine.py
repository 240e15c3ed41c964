"""What this machine is: what the doctor says of it, what the kernel takes, and what a probe costs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

from railscope.probes.loading.calibration import CalibrationError, measure_trap_ns
from railscope.probes.loading.links import AttachKind
from tests.gpu.lane import Lane, agent_command
from tests.gpu.rails import two_hosts
from tests.gpu.table import Verdict

EVIDENCE: Final = {
    "kernel-config.gz": "cat /proc/config.gz",
    "dmesg.txt": "dmesg",
    "environment.txt": "env",
    "processor.txt": "lscpu",
    "mounts.txt": "mount; ls /sys/kernel/btf /sys/bus/event_source/devices",
    "packages.txt": "python3 -m pip list",
}
"""What explains a surprise later: files, and the commands that fill them."""
_WARM: Final = """
import time
began = time.monotonic()
import torch, torch._dynamo, torch.distributed
loaded = time.monotonic()
torch.zeros(1, device="cuda")
print(loaded - began, time.monotonic() - loaded)
"""
_WARM_SECONDS: Final = 60.0


def run(lane: Lane) -> None:
    if not lane.simulated:
        with lane.attempt("warm up"):
            _warm(lane)
    with lane.attempt("doctor"):
        _doctor(lane)
    with lane.attempt("what a probe costs"):
        _traps(lane)
    with lane.attempt("rails"), two_hosts() as two:
        lane.rows.add("rails of the two ranks", two.made_of, verdict=Verdict.SEEN if two.veth else Verdict.ABSENT)
    for name, command in EVIDENCE.items():
        with lane.attempt(name), (lane.folder / name).open("wb") as file:
            subprocess.run(["sh", "-c", command], stdout=file, stderr=subprocess.DEVNULL, timeout=10)


def _warm(lane: Lane) -> None:
    """Import PyTorch from a cold disk, and set up the GPU, before a check has to wait for it."""
    command = [sys.executable, "-c", _WARM]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_WARM_SECONDS, check=True)
    loaded, made = map(float, done.stdout.split())
    lane.rows.figure("first import of PyTorch, s", loaded)
    lane.rows.figure("first use of the GPU, s", made)


def _doctor(lane: Lane) -> None:
    done = subprocess.run([*agent_command(), "doctor", "--json"], capture_output=True, text=True, timeout=20)
    (lane.folder / "doctor.json").write_text(done.stdout)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"doctor could not run: {done.stderr.strip()}")
    doctor: dict[str, Any] = json.loads(done.stdout)
    lane.rows.add("kernel", doctor["kernel"])
    for finding in doctor["findings"]:
        if finding["status"] == "problem":
            lane.rows.add(f"doctor: {finding['check']}", finding["what"], verdict=Verdict.DIFFERS)
        elif finding["check"] in ("probes", "kernel", "NVLink", "devices"):
            lane.rows.add(f"doctor: {finding['check']}: {finding['status']}", finding["what"])


def _traps(lane: Lane) -> None:
    for kind in AttachKind:
        what = f"trap of a probe ({kind.name.lower()}), ns"
        try:
            lane.rows.figure(what, measure_trap_ns(kind))
        except CalibrationError as error:
            lane.rows.add(what, str(error), verdict=Verdict.ABSENT)
