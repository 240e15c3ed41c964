"""A user fills a network namespace of his own with devices and changes them without end: the loop stays with others."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from railscope.agent.node.rails.netdev_rails import NetdevRails
from railscope.probes.clock import SystemClock
from railscope.probes.processes.namespaces import network_namespace

pytestmark = [pytest.mark.root]

UID, PAIRS, CHANGES = 5000, 1000, 30
_MAKE = (
    f"for i in $(seq {PAIRS}); do echo link add ib$i type veth peer name q$i; done | ip -batch - "
    "&& echo ready && read x"
)
PROCFS = Path("/proc")


def test_a_user_s_thousands_of_changing_devices_take_a_part_of_the_loop_s_time_only() -> None:
    line = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "unshare", "-Urn", "sh", "-c", _MAKE]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip("users may make no network namespaces here")
        rails = NetdevRails(
            SystemClock(),
            procfs=PROCFS,
            sysfs=Path("/sys"),
            sample_interval_ns=100_000_000,
            window_ns=1_000_000_000,
            lifetime_ns=0,
            patterns=(),
        )
        try:
            events = rails.add_process(process.pid, network_namespace(PROCFS, process.pid), "")
            assert events is not None
            looks = []
            for at in range(CHANGES):
                change(process.pid, "up" if at % 2 == 0 else "down")
                began = time.monotonic()
                rails.handle_link_events(events)
                looks.append(time.monotonic() - began)
            # A namespace that is looked at each time takes as long for each.
            assert sum(looks) < max(looks) * CHANGES / 3, looks
            change(process.pid, "up")
            rails.handle_link_events(events)
            deadline = time.monotonic() + 60
            while not is_up(rails) and time.monotonic() < deadline:
                time.sleep(0.2)
                rails.update(())
            assert is_up(rails), "what was postponed is seen at a tick"
        finally:
            rails.close()
            process.kill()


def change(pid: int, state: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "link", "set", "ib1", state], check=True)


def is_up(rails: NetdevRails) -> bool:
    return any(one.device.name == "ib1" and one.device.up for one in rails.decisions())
