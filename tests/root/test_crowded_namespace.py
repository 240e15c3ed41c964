"""A user fills network namespaces of his own with devices: the loop stays with others, and so does the memory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from railscope.agent.node.inspection.tenants import Tenant, tenant_of
from railscope.agent.node.rails.namespace_shares import MOST_DEVICES, MOST_NAMESPACES
from railscope.agent.node.rails.netdev_rails import NetdevRails
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.netlink import AnswerTooLong
from railscope.probes.netdev.sources import open_namespace
from railscope.probes.processes.namespaces import made_by_root, network_namespace

pytestmark = [pytest.mark.root]

UID, PAIRS, CHANGES = 5000, 100, 100
PROCFS, SYSFS = Path("/proc"), Path("/sys")


@contextmanager
def a_namespace_of_a_user(pairs: int) -> Iterator[int]:
    """A process of a user's in a network namespace of its own, with so many pairs of devices; its pid."""
    make = (
        f"for i in $(seq {pairs}); do echo link add ib$i type veth peer name q$i; done | ip -batch - "
        "&& echo ready && read x"
    )
    line = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "unshare", "-Urn", "sh", "-c", make]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                pytest.skip("users may make no network namespaces here")
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def rails() -> Iterator[NetdevRails]:
    made = NetdevRails(
        SystemClock(),
        procfs=PROCFS,
        sysfs=SYSFS,
        sample_interval_ns=100_000_000,
        window_ns=1_000_000_000,
        lifetime_ns=300_000_000_000,
        patterns=(),
    )
    try:
        yield made
    finally:
        made.close()


def test_a_user_s_devices_that_change_without_end_take_a_part_of_the_loop_s_time_only(rails: NetdevRails) -> None:
    with a_namespace_of_a_user(PAIRS) as pid:
        events = rails.add_process(pid, network_namespace(PROCFS, pid), "")
        assert events is not None
        looks = []
        began = time.monotonic()
        for at in range(CHANGES):
            change(pid, "up" if at % 2 == 0 else "down")
            look_began = time.monotonic()
            rails.handle_link_events(events)
            looks.append(time.monotonic() - look_began)
        # A tenth of the time, a tenth of a second at once, and the look that exceeds it.
        assert sum(looks) < 0.1 * (time.monotonic() - began) + 0.1 + 2 * max(looks), looks
        change(pid, "up")
        rails.handle_link_events(events)
        deadline = time.monotonic() + 60
        while not is_up(rails) and time.monotonic() < deadline:
            time.sleep(0.2)
            rails.update(())
        assert is_up(rails), "what was postponed is seen at a tick"


def test_a_namespace_with_more_devices_than_its_user_may_have_is_not_read_to_its_end(rails: NetdevRails) -> None:
    with a_namespace_of_a_user(2 * MOST_DEVICES) as pid:
        namespace = network_namespace(PROCFS, pid)
        assert not made_by_root(namespace)
        with pytest.raises(AnswerTooLong):
            open_namespace(namespace, procfs=PROCFS, sysfs=SYSFS, clock=SystemClock(), most_devices=MOST_DEVICES)
        for _ in range(2):
            assert rails.add_process(pid, namespace, "ib", tenant=tenant_of(PROCFS, pid)) is None
        assert not rails.watches(namespace.inode)
        assert rails.shares.refused_by_user == {UID: 1}, "it is left alone for a while"


def test_a_namespace_that_gets_more_devices_than_its_user_may_have_is_let_go(rails: NetdevRails) -> None:
    with a_namespace_of_a_user(PAIRS) as pid:
        namespace = network_namespace(PROCFS, pid)
        events = rails.add_process(pid, namespace, "=ib1", tenant=Tenant(UID))
        assert events is not None
        assert rails.watches(namespace.inode)
        assert [one.device for one in rails.rails()] == ["ib1"]
        more = "\n".join(f"link add x{at} type veth peer name y{at}" for at in range(PAIRS))
        subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"], input=more.encode(), check=True)
        deadline = time.monotonic() + 60
        closed: list[object] = []
        while not closed and time.monotonic() < deadline:
            rails.handle_link_events(events)
            closed += rails.update(())
        assert closed == [events], "it is not polled any more"
        assert not rails.watches(namespace.inode)
        assert [one.device for one in rails.rails()] == ["ib1"], "what it had carried stays readable for a while"


def test_a_user_has_so_many_namespaces_and_another_user_still_has_his(rails: NetdevRails) -> None:
    with ExitStack() as stack:
        pids = [stack.enter_context(a_namespace_of_a_user(0)) for _ in range(MOST_NAMESPACES + 2)]
        places = [network_namespace(PROCFS, pid) for pid in pids]
        deadline = time.monotonic() + 60
        for pid, namespace in zip(pids[:-2], places[:-2], strict=True):
            rails.add_process(pid, namespace, "", tenant=Tenant(UID))
            while not rails.watches(namespace.inode) and time.monotonic() < deadline:
                rails.update(())  # it may have to wait for its user's share of the time
        rails.add_process(pids[-2], places[-2], "", tenant=Tenant(UID))
        rails.update(())
        rails.add_process(pids[-1], places[-1], "", tenant=Tenant(UID + 1))
        assert [rails.watches(one.inode) for one in places] == [True] * MOST_NAMESPACES + [False, True]


def change(pid: int, state: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "link", "set", "ib1", state], check=True)


def is_up(rails: NetdevRails) -> bool:
    return any(one.device.name == "ib1" and one.device.up for one in rails.decisions())
