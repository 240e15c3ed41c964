"""The shipped unit under a real systemd: it starts, tells when it is ready, observes, and stops, with few rights.

systemd-nspawn boots this machine's own root, below a throw-away overlay, with systemd as its first process.  Inside,
tests/root/systemd_check.py starts the unit as it is shipped, looks at it, stops it, and leaves what it saw in a file;
the tests read that file.  The only thing made up is `/opt/railscope/bin/railscope`, a command that runs this
checkout, as the one that pip writes does.  The container has its own network, so that no port is in the way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.root.container import boot, inside, throw_away_root
from tests.root.systemd_check import (
    CALL_ELEMENTS,
    CONFIGURATION,
    DROP_INS_KEPT,
    EVENTS,
    HARDWARE,
    HARDWARE_KEPT,
    OLDER,
    SEEN,
    SHIPPED,
)
from tests.root.systemd_check import UNIT as INSTALLED_UNIT

pytestmark = [pytest.mark.root, pytest.mark.systemd]

REPOSITORY: Final = Path(__file__).resolve().parents[2]
UNIT: Final = REPOSITORY / "deploy/systemd/railscope.service"
DROP_IN: Final = REPOSITORY / "deploy/systemd/railscope.service.d/older-kernels.conf"
HARDWARE_DROP_IN: Final = DROP_IN.with_name("hardware-events.conf")
KERNEL: Final = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
SYSTEM_ADMIN: Final = 21
"""Number of CAP_SYS_ADMIN; source: include/uapi/linux/capability.h."""
DAC_READ_SEARCH, SYS_PTRACE, NET_ADMIN, NET_RAW, SYSLOG = 2, 19, 12, 13, 34
FOUR: Final = frozenset({2, 19, 38, 39})
"""CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_PERFMON, CAP_BPF."""

INSTALLED_COMMAND: Final = Path("/opt/railscope/bin/railscope")
CHECKOUT: Final = Path("/opt/checkout")
"""Where the container sees this checkout, too: the service has a /tmp of its own, and a checkout may lie there."""
INTERPRETER: Final = (
    CHECKOUT / Path(sys.executable).relative_to(REPOSITORY)
    if Path(sys.executable).is_relative_to(REPOSITORY)
    else Path(sys.executable)
)
COMMAND: Final = f"""#!{INTERPRETER}
import sys
sys.path.insert(0, {str(CHECKOUT / ".venv/tree")!r})
from railscope.agent.cli.main import main
sys.exit(main())
"""

CHECK_UNIT: Final = f"""
[Unit]
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
WorkingDirectory={REPOSITORY}
ExecStart={sys.executable} -m tests.root.systemd_check
TimeoutStartSec=180
"""

CHECK_TARGET: Final = """
[Unit]
Wants=railscope-check.service systemd-journald.service
AllowIsolate=yes
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the check saw inside the container."""

    facts: dict[str, Any]
    console: str

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def started(self, run: str) -> dict[str, Any]:
        """What was seen of one run of the service: `SHIPPED`, `HARDWARE` or `OLDER`."""
        if run in (SHIPPED, HARDWARE) and KERNEL < (6, 6):
            pytest.skip("kernels before 6.6 need the drop-in: the unit alone cannot attach here")
        saw: dict[str, Any] = self.facts[run]
        assert saw["start"]["status"] == 0, f"{saw['start']['output']}\n{self['journal']}\n{self.console}"
        return saw


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """This machine's root below an overlay in memory."""
    with throw_away_root(Path("/"), tmp_path_factory.mktemp("systemd")) as made:
        # What an agent started by hand has left on this machine; in the overlay only.
        shutil.rmtree(made / "var/lib/railscope", ignore_errors=True)
        yield made


@pytest.fixture(scope="module")
def seen(root: Path) -> Seen:
    """Boot, check, and power off; once for all tests."""
    files = {
        str(INSTALLED_UNIT): UNIT.read_text(),
        "/etc/systemd/system/railscope-check.service": CHECK_UNIT,
        "/etc/systemd/system/railscope-check.target": CHECK_TARGET,
        str(CONFIGURATION): (REPOSITORY / "deploy/railscope.yml").read_text(),
        "/etc/fstab": "",
        f"{DROP_INS_KEPT}/{DROP_IN.name}": DROP_IN.read_text(),
        f"{HARDWARE_KEPT}/{HARDWARE_DROP_IN.name}": HARDWARE_DROP_IN.read_text(),
        str(INSTALLED_COMMAND): COMMAND,
    }
    for name, text in files.items():
        path = inside(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    inside(root, INSTALLED_COMMAND).chmod(0o755)
    for place in (REPOSITORY, Path(sys.base_prefix)):
        for folder in place.parents:  # a checkout or a Python in somebody's home; in the overlay only
            copy = inside(root, folder)
            copy.chmod(copy.stat().st_mode | 0o111)
    binds = (f"{REPOSITORY}", f"{REPOSITORY}:{CHECKOUT}", sys.base_prefix)
    done = boot(root, "railscope-check.target", binds)
    result = inside(root, SEEN)
    assert result.exists(), f"systemd did not get as far as the check (status {done.returncode}):\n{done.stdout}"
    facts = json.loads(result.read_text())
    assert facts.get("finished"), f"the check did not come to its end: {facts}\n{done.stdout}"
    assert done.returncode == 0, done.stdout
    return Seen(facts, done.stdout)


def capabilities(hexadecimal: str) -> frozenset[int]:
    mask = int(hexadecimal, 16)
    return frozenset(number for number in range(64) if mask >> number & 1)


def test_systemd_finds_nothing_wrong_in_the_unit(seen: Seen) -> None:
    assert seen["verify"] == {"status": 0, "output": ""}


def test_the_unit_stays_hardened(seen: Seen) -> None:
    assert seen["security"]["status"] == 0, seen["security"]["output"]


@pytest.mark.parametrize("run", [SHIPPED, OLDER])
def test_the_service_tells_that_it_is_ready(seen: Seen, run: str) -> None:
    running = seen.started(run)["running"]
    assert (running["Type"], running["ActiveState"], running["SubState"]) == ("notify", "active", "running")


def test_metrics_answer_as_soon_as_the_service_is_ready(seen: Seen) -> None:
    text = seen.started(SHIPPED)["first_metrics"]
    assert re.search(r'^railscope_build_info\{.*simulated="false".*\} 1$', text, re.MULTILINE)


@pytest.mark.parametrize(
    ("run", "allowed"),
    [(SHIPPED, FOUR), (OLDER, FOUR | {SYSTEM_ADMIN}), (HARDWARE, FOUR | {NET_ADMIN, NET_RAW, SYSLOG})],
)
def test_the_process_has_these_capabilities_and_a_user_of_its_own(seen: Seen, run: str, allowed: set[int]) -> None:
    process = seen.started(run)["process"]
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        assert capabilities(process[kind]) == allowed, kind
    assert 0 not in map(int, process["Uid"].split())
    assert (process["NoNewPrivs"], process["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize("run", [SHIPPED, OLDER])
def test_another_users_job_with_a_private_library_is_counted(seen: Seen, run: str) -> None:
    text = seen.started(run)["metrics"]
    found = {
        name: re.search(rf'^railscope_{name}\{{op="AllReduce",dtype="float32",.*\}} (\d+)$', text, re.MULTILINE)
        for name in ("collective_calls_total", "collective_payload_bytes_total")
    }
    assert all(found.values()), f"{text}\n{seen['journal']}"
    calls, payload_bytes = (int(match[1]) for match in found.values() if match)
    assert calls > 0
    assert payload_bytes == calls * CALL_ELEMENTS * 4


@pytest.mark.parametrize("run", [SHIPPED, OLDER])
def test_a_signal_makes_the_service_write_a_recording_that_others_cannot_read(seen: Seen, run: str) -> None:
    recording = seen.started(run)["recording"]
    assert recording, seen["journal"]
    assert recording["calls"] > 0
    assert recording["mode"] == "0o600"


def test_the_kernels_log_is_read_with_the_drop_in_for_hardware_events_and_not_without(seen: Seen) -> None:
    with_rights, without = seen.started(HARDWARE), seen.started(SHIPPED)
    assert EVENTS in with_rights["metrics"], f"{with_rights['metrics']}\n{seen['journal']}"
    assert 'railscope_collector_success{collector="kmsg"} 1' in with_rights["metrics"]
    assert 'collector="kmsg"' not in without["metrics"]
    assert "/dev/kmsg is not read" in seen["journal"], "it says so once"


@pytest.mark.parametrize("run", [SHIPPED, HARDWARE, OLDER])
def test_what_reads_tenants_files_has_fewer_rights_than_the_agent(seen: Seen, run: str) -> None:
    helpers = seen.started(run)["helpers"]
    allowed = {DAC_READ_SEARCH, SYS_PTRACE} | ({SYSTEM_ADMIN} if run == OLDER else set())
    assert any(capabilities(helper["CapEff"]) == allowed for helper in helpers), helpers
    assert all((helper["NoNewPrivs"], helper["Seccomp"]) == ("1", "2") for helper in helpers)


@pytest.mark.parametrize("run", [SHIPPED, OLDER])
def test_reload_takes_over_a_right_configuration_and_leaves_the_service_with_a_wrong_one(seen: Seen, run: str) -> None:
    saw = seen.started(run)
    right, wrong = saw["reloads"]
    assert (right["status"], right["text"]) == (0, "configuration reloaded")
    assert (wrong["status"], wrong["text"]) == (0, "the configuration has 1 error(s) and was not reloaded")
    assert saw["reloaded"]["MainPID"] == saw["running"]["MainPID"]
    assert (saw["reloaded"]["ActiveState"], saw["reloaded"]["SubState"]) == ("active", "running")
    assert "configuration reloaded: logging.level info -> debug" in seen["journal"]


def test_the_journal_knows_which_lines_are_warnings_and_errors(seen: Seen) -> None:
    lines = [json.loads(line) for line in seen["warnings"].splitlines()]
    told = {(line["PRIORITY"], re.sub(r".*msg=", "", line["MESSAGE"])) for line in lines}
    assert ("4", '"these take a restart of the agent: rails.window 30s -> 10s"') in told
    assert any(priority == "3" and "logging.levle is no key of this file" in text for priority, text in told), told
    assert all(line["MESSAGE"].startswith("ts=") for line in lines)


@pytest.mark.parametrize(("number", "result"), [("SIGTERM", "success"), ("SIGKILL", "signal"), ("SIGSTOP", "watchdog")])
def test_the_service_comes_back_after_any_end(seen: Seen, number: str, result: str) -> None:
    seen.started(SHIPPED)
    now = seen["ended"][number]
    assert (now["ActiveState"], now["SubState"]) == ("active", "running"), seen["journal"]
    assert now["MainPID"] != now["before"]
    assert result == "success" or f"Failed with result '{result}'" in seen["journal"]


def test_the_shipped_service_is_watched_and_restarted(seen: Seen) -> None:
    running = seen.started(SHIPPED)["running"]
    assert (running["WatchdogUSec"], running["Restart"], running["KillMode"]) == ("30s", "always", "mixed")
    assert (running["StartLimitIntervalUSec"], running["TimeoutStopUSec"]) == ("0", "10s")


@pytest.mark.parametrize("run", [SHIPPED, OLDER])
def test_stop_ends_the_service_cleanly(seen: Seen, run: str) -> None:
    saw = seen.started(run)
    assert saw["stop"] == {"status": 0, "output": ""}
    stopped = saw["stopped"]
    assert (stopped["ActiveState"], stopped["Result"], stopped["ExecMainStatus"]) == ("inactive", "success", "0")
    assert saw["stop_seconds"] < 5
    assert "Traceback" not in seen["journal"]
