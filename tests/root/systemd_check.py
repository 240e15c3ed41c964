"""What tests/root/test_systemd.py runs inside its container: starts the service, looks, stops it, says what it saw.

    python -m tests.root.systemd_check

The unit, the drop-in for older kernels and the configuration file lie where the test put them.  The result is one
JSON file; where it is missing, or lacks `finished`, the check did not come to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from railscope.agent.recording.file import read_recording
from railscope.testbed.job import LIBRARY

SEEN: Final = Path("/seen.json")
UNIT: Final = Path("/etc/systemd/system/railscope.service")
DROP_INS: Final = Path("/etc/systemd/system/railscope.service.d")
DROP_INS_KEPT: Final = Path("/older-kernels")
"""Where the drop-in waits for its turn."""
HARDWARE_KEPT: Final = Path("/hardware-events")
"""And the one for the kernel's log and modules."""
KERNEL_LOG: Final = Path("/dev/kmsg")
"""In the container a pipe, into which this check writes records; the unit gives and takes the right to it by name."""
CONFIGURATION: Final = Path("/etc/railscope/railscope.yml")
RECORDINGS: Final = Path("/var/lib/railscope/recordings")
METRICS: Final = "http://127.0.0.1:9779/metrics"

SHIPPED: Final = "shipped"
OLDER: Final = "older kernels"
"""With the drop-in, and with perf events chosen as on a kernel that has nothing else."""

HARDWARE: Final = "hardware events"
"""With the drop-in for hardware events."""
XID: Final = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=python, GPU has fallen off the bus."
EVENTS: Final = 'railscope_hardware_events_total{kind="xid",code="79"'

CALL_ELEMENTS: Final = 1024
NOBODY: Final = 65534
PRIVATE_LIBRARY: Final = Path("/private/libnccl.so.2")
"""A library in a folder that only its owner may enter."""
JOB: Final = f"""
import ctypes, time
library = ctypes.CDLL({str(PRIVATE_LIBRARY)!r})
print("mapped", flush=True)
while True:
    library.ncclAllReduce(None, None, ctypes.c_size_t({CALL_ELEMENTS}), 7, 0, None, None)
    time.sleep(0.02)
"""
"""A job of another user, which runs before the service does; 7 is float32.  Its communicator is null, so every call is
refused, and counted before that."""
MOST_EXPOSURE: Final = 25
"""Of `systemd-analyze security`, in tenths."""
RELOADED: Final = "logging: {level: debug}\nrails: {window: 10s}\n"
WRONG: Final = "logging: {levle: debug}\n"
HASTY: Final = "[Service]\nWatchdogSec=3s\n"
"""A drop-in, so that the check need not wait for the shipped watchdog."""
CALLS: Final = "railscope_collective_calls_total{"
MOST_SECONDS: Final = 20


def main() -> None:
    seen: dict[str, Any] = {}
    try:
        seen["verify"] = run("systemd-analyze", "verify", "--man=no", str(UNIT))
        seen["security"] = run(
            "systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSURE}", str(UNIT)
        )
        with job():
            seen[SHIPPED] = service()
            seen["ended"] = ended_by_others()
            HARDWARE_KEPT.rename(DROP_INS)
            run("systemctl", "daemon-reload")
            seen[HARDWARE] = hardware_events()
            DROP_INS.rename(HARDWARE_KEPT)
            DROP_INS_KEPT.rename(DROP_INS)
            CONFIGURATION.write_text("probes: {attach: perf}\n")
            run("systemctl", "daemon-reload")
            seen[OLDER] = service()
        seen["finished"] = True
    finally:
        seen["warnings"] = run(
            "journalctl", "--unit=railscope", "--output=json", "--no-pager", "--priority=warning", "_TRANSPORT=stdout"
        )["output"]
        seen["journal"] = run("journalctl", "--unit=railscope", "--output=cat", "--no-pager")["output"]
        SEEN.write_text(json.dumps(seen))


def service() -> dict[str, Any]:
    """Start, look, wait until the job is observed, stop."""
    saw: dict[str, Any] = {"start": run("systemctl", "start", "railscope"), "running": unit()}
    if saw["start"]["status"] == 0:
        saw["process"] = status_of(saw["running"]["MainPID"])
        saw["first_metrics"] = metrics()
        saw["metrics"] = metrics_with(CALLS)
        saw["helpers"] = helpers()
        saw["recording"] = recording()
        saw["reloads"] = [reload(text) for text in (RELOADED, WRONG)]
        saw["reloaded"] = unit()
    began = time.monotonic()
    saw["stop"] = run("systemctl", "stop", "railscope")
    saw["stop_seconds"] = time.monotonic() - began
    saw["stopped"] = unit()
    return saw


def hardware_events() -> dict[str, Any]:
    """Start with the rights to read the kernel's log, which tells of an XID, and stop."""
    KERNEL_LOG.unlink(missing_ok=True)
    os.mkfifo(KERNEL_LOG, 0o600)
    # Both ends are open: whoever else writes there, systemd among them, does not wait for a reader.
    log = os.open(KERNEL_LOG, os.O_RDWR | os.O_NONBLOCK)
    saw: dict[str, Any] = {"start": run("systemctl", "start", "railscope"), "running": unit()}
    if saw["start"]["status"] == 0:
        saw["process"] = status_of(saw["running"]["MainPID"])
        deadline = time.monotonic() + MOST_SECONDS
        while EVENTS not in (text := metrics()) and time.monotonic() < deadline:
            # Again and again: what others write may come with it in one reading, which only looks at the beginning.
            os.write(log, f"3,1,{time.monotonic_ns() // 1000},-;{XID}\n".encode())
            time.sleep(0.5)
        saw["metrics"] = text
        saw["helpers"] = helpers()
    saw["stop"] = run("systemctl", "stop", "railscope")
    os.close(log)
    KERNEL_LOG.unlink()
    return saw


def status_of(pid: str) -> dict[str, str]:
    status = Path("/proc", pid, "status").read_text()
    return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)


def helpers() -> list[dict[str, str]]:
    """The status of each process of the service but the agent itself."""
    agent = unit()["MainPID"]
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            group = (status.parent / "cgroup").read_text()
            if "railscope.service" in group and fields["Pid"] != agent:
                found.append(fields)
    return found


def reload(text: str) -> dict[str, Any]:
    """Write another configuration and reload; what systemd says when the agent says that it has done so."""
    before, told = CONFIGURATION.read_text(), unit()["StatusText"]
    CONFIGURATION.write_text(text)
    done = run("systemctl", "reload", "railscope")
    deadline = time.monotonic() + MOST_SECONDS
    while unit()["StatusText"] == told and time.monotonic() < deadline:
        time.sleep(0.1)
    CONFIGURATION.write_text(before)
    return {**done, "text": unit()["StatusText"]}


def ended_by_others() -> dict[str, dict[str, str]]:
    """The service after something else than "systemctl stop" has ended it, in one way after the other."""
    hasty = DROP_INS / "hasty.conf"
    hasty.parent.mkdir()
    hasty.write_text(HASTY)
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "railscope")
    after = {}
    for number in ("SIGTERM", "SIGKILL", "SIGSTOP"):
        pid = unit()["MainPID"]
        run("systemctl", "kill", "--kill-who=main", f"--signal={number}", "railscope")
        deadline = time.monotonic() + MOST_SECONDS
        while time.monotonic() < deadline:
            now = unit()
            if now["SubState"] == "running" and now["MainPID"] not in ("0", pid):
                break
            time.sleep(0.1)
        after[number] = {**unit(), "before": pid}
    run("systemctl", "stop", "railscope")
    hasty.unlink()
    hasty.parent.rmdir()
    return after


@contextlib.contextmanager
def job() -> Iterator[None]:
    """The job, with its library mapped."""
    PRIVATE_LIBRARY.parent.mkdir(mode=0o700)
    shutil.copy(LIBRARY, PRIVATE_LIBRARY)
    os.chown(PRIVATE_LIBRARY.parent, NOBODY, NOBODY)
    command = [sys.executable, "-c", JOB]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, user=NOBODY, group=NOBODY, extra_groups=[]
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "mapped\n", "the job does not start"
            yield
        finally:
            process.kill()


def run(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {"status": done.returncode, "output": done.stdout}


def unit() -> dict[str, str]:
    lines = run("systemctl", "show", "railscope")["output"].splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def metrics() -> str:
    with urllib.request.urlopen(METRICS, timeout=10) as answer:
        text: bytes = answer.read()
    return text.decode()


def recording() -> dict[str, Any]:
    """What the flight recorder writes when it is signalled; empty: nothing."""
    before = set(RECORDINGS.glob("*.npz"))
    run("systemctl", "kill", "--kill-who=main", "--signal=SIGUSR2", "railscope")
    deadline = time.monotonic() + MOST_SECONDS
    while not (made := set(RECORDINGS.glob("*.npz")) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not made:
        return {}
    path = made.pop()
    return {"calls": len(read_recording(path).calls), "mode": oct(path.stat().st_mode & 0o777)}


def metrics_with(sample: str) -> str:
    """The first metrics that have a sample which begins so, or the last ones when none come."""
    deadline = time.monotonic() + MOST_SECONDS
    while sample not in (text := metrics()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return text


if __name__ == "__main__":
    main()
