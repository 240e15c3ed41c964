"""The Debian package on bare roots: installed, observing, upgraded with its totals, removed, purged, nothing left.

systemd-nspawn boots a Debian that mmdebstrap made (make-root) below a throw-away overlay; inside, deb_check.py does
what an administrator would, and leaves what it saw in a file.  The roots have what the package depends on and nothing
of this project; the kernel is this machine's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.nccl.library import REPOSITORY
from tests.packages.conftest import Packages
from tests.root.container import boot, inside, throw_away_root

pytestmark = [pytest.mark.root, pytest.mark.systemd, pytest.mark.slow, pytest.mark.timeout(900)]

HERE: Final = Path(__file__).parent
ROOTS: Final = REPOSITORY / ".venv/roots"
ANSIBLE: Final = REPOSITORY / "deploy/ansible"
KERNEL: Final = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
CHECK_UNIT: Final = """
[Unit]
SuccessAction=exit-force
FailureAction=exit-force
After=sysinit.target
[Service]
Type=oneshot
ExecStart=/usr/bin/python3 /deb_check.py /old.deb /new.deb
TimeoutStartSec=220
"""
CHECK_TARGET: Final = """
[Unit]
Wants=railscope-check.service systemd-journald.service sysinit.target
AllowIsolate=yes
"""


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def seen(
    packages: Packages, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What deb_check.py saw on one release of Debian; once for all tests."""
    release = request.param
    made = subprocess.run([HERE / "make-root", release, ROOTS / release], capture_output=True, text=True, timeout=600)
    if made.returncode != 0:
        pytest.skip(f"no bare root of Debian {release}: {' '.join((made.stdout + made.stderr).split())[-300:]}")
    with throw_away_root(ROOTS / release, tmp_path_factory.mktemp(release)) as root:
        for source, place in (
            (packages.old, "/old.deb"),
            (packages.new, "/new.deb"),
            (HERE / "deb_check.py", "/deb_check.py"),
        ):
            shutil.copy(source, inside(root, place))
        # The role finds its files beside it, as in a checkout.
        shutil.copytree(ANSIBLE, inside(root, "/deploy/ansible"))
        inside(root, "/dist").mkdir()
        shutil.copy(packages.new, inside(root, "/dist") / packages.new.name)
        for name, text in (("service", CHECK_UNIT), ("target", CHECK_TARGET)):
            inside(root, f"/etc/systemd/system/railscope-check.{name}").write_text(text)
        # The root was made without its first boot: neither has it a machine's number, nor may dpkg start nothing.
        inside(root, "/etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        inside(root, "/usr/sbin/policy-rc.d").unlink(missing_ok=True)
        done = boot(root, "railscope-check.target")
        result = inside(root, "/seen.json")
        assert result.exists(), f"systemd did not get as far as the check (status {done.returncode}):\n{done.stdout}"
        facts: dict[str, Any] = json.loads(result.read_text())
    assert facts.get("finished"), f"the check did not come to its end after {list(facts)}\n{done.stdout[-2000:]}"
    return facts


def test_the_service_runs_when_dpkg_returns_and_is_enabled(seen: dict[str, Any]) -> None:
    assert seen["install"]["status"] == 0, seen["install"]["output"]
    installed = seen["installed"]
    assert (installed["ActiveState"], installed["SubState"]) == ("active", "running"), seen["journal"]
    assert installed["UnitFileState"] == "enabled"
    assert bool(installed["DropInPaths"]) == (KERNEL < (6, 6)), "the drop-in is for older kernels"


def test_the_version_and_the_commit_are_told(seen: dict[str, Any]) -> None:
    version, revision = re.fullmatch(r"railscope (\S+) \((.+)\)", seen["installed"]["version"]).groups()  # type: ignore[union-attr]
    assert f'version="{version}",revision="{revision}"' in seen["installed"]["build_info"]
    assert revision == (REPOSITORY / "probes/revision.txt").read_text().strip()


def test_the_shipped_configuration_is_right_and_the_manual_page_is_found(seen: dict[str, Any]) -> None:
    assert seen["installed"]["check"]["status"] == 0, seen["installed"]["check"]
    page = seen["installed"]["man"]["output"]
    assert "--web.listen-address" in page
    assert "warning" not in page
    assert seen["installed"]["missing"] == []


def test_the_doctor_finds_what_the_package_brings(seen: dict[str, Any]) -> None:
    findings = {one["check"]: one for one in json.loads(seen["installed"]["doctor"]["output"])["findings"]}
    for check in ("libbpf", "BPF objects", "probes"):
        assert findings[check]["status"] == "ok", findings[check]


def test_another_users_job_is_counted(seen: dict[str, Any]) -> None:
    assert seen["observed"] >= 20, seen["journal"]
    assert seen["uprobes_while_it_runs"]


def test_an_upgrade_restarts_the_service_and_totals_go_on(seen: dict[str, Any]) -> None:
    assert seen["upgrade"]["status"] == 0, seen["upgrade"]["output"]
    assert seen["upgraded"]["MainPID"] not in ("0", seen["installed"]["MainPID"])
    assert seen["upgraded"]["ActiveState"] == "active"
    assert seen["after_upgrade"]["calls"] >= seen["before_upgrade"]["calls"] > 0
    assert seen["counted_after_upgrade"] >= 50


def test_all_is_compiled_for_the_python_that_is_there_and_nvidias_bindings_are_too(seen: dict[str, Any]) -> None:
    for moment in ("installed", "upgraded"):
        assert seen[moment]["bytecode"] == seen[moment]["sources"] > 300
        assert seen[moment]["nvml"]["status"] == 0, seen[moment]["nvml"]


def test_slurms_prolog_starts_the_service_and_waits_until_it_is_ready(seen: dict[str, Any]) -> None:
    assert seen["slurm"]["prolog"] == {"status": 0, "output": ""}
    assert seen["slurm"]["ready_later"]
    # It waits 3 s at most, which are too few on a busy machine.
    waited_in_vain = "job 4711: railscope is not ready, and may miss" in seen["slurm"]["journal_of_prolog"]
    assert seen["slurm"]["ready"] != waited_in_vain


def test_slurms_epilog_writes_the_jobs_stalls_into_the_journal_and_no_other_jobs(seen: dict[str, Any]) -> None:
    assert seen["slurm"]["epilog"] == {"status": 0, "output": ""}
    assert seen["slurm"]["epilog_of_another"] == {"status": 0, "output": ""}
    lines = seen["slurm"]["journal_of_epilog"].splitlines()
    assert lines, seen["slurm"]
    for line in lines:
        assert re.match(r"job 4711: AllReduce of rank [01] stalled for \d+ s, process_stopped, rank 1 is blamed", line)


def test_ansibles_role_configures_it_and_changes_nothing_the_second_time(seen: dict[str, Any]) -> None:
    if "ansible" not in seen:
        pytest.skip("this root is made without ansible-core: run the test of trixie, whose root has it")
    first, second = seen["ansible"]
    assert first["status"] == second["status"] == 0, first["output"] + second["output"]
    assert re.search(r"localhost\s+: ok=\d+ +changed=[1-9]", first["output"])
    assert re.search(r"localhost\s+: ok=\d+ +changed=0 ", second["output"]), second["output"]
    assert seen["after_ansible"]["ActiveState"] == "active"
    assert seen["after_ansible"]["check"]["status"] == 0


def test_removal_ends_the_service_leaves_the_job_and_keeps_the_configuration(seen: dict[str, Any]) -> None:
    assert seen["remove"]["status"] == 0, seen["remove"]["output"]
    after = seen["after_remove"]
    assert after["active"] != "active"
    assert (after["programs"], after["pins"], after["job"]) == ([], [], None)
    assert after["configuration"]


def test_a_purge_leaves_nothing(seen: dict[str, Any]) -> None:
    assert seen["purge"]["status"] == 0, seen["purge"]["output"]
    assert seen["left"] == []


def test_lintian_has_nothing_to_say_beyond_the_named_overrides(packages: Packages) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is missing: run 'make packages-test' as root")
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", packages.old],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout
