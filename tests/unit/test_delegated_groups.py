"""A user names control groups below his own systemd as he likes: they make him no other tenant, job or pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.node.inspection.tenants import Tenant, tenant_of
from railscope.agent.node.targets.jobs import JobFacts, job_facts, place_of_cgroup

OWN = "/user.slice/user-5000.slice/user@5000.service"
POD = "0f3a1b2c-1111-2222-3333-444455556666"
CONTAINER = "ab" * 32


def process_in(procfs: Path, group: str) -> Path:
    folder = procfs / "42"
    folder.mkdir(parents=True)
    (folder / "status").write_bytes(b"Name:\tx\nUid:\t5000\t5000\t5000\t5000\n")
    (folder / "cgroup").write_text(f"0::{group}\n")
    return procfs


@pytest.mark.parametrize("name", [f"kubepods/pod{POD}", f"docker-{CONTAINER}.scope", f"x/kubepods-pod{POD}.slice"])
@pytest.mark.parametrize("above", ["", "/../.."])
def test_a_user_is_one_tenant_however_many_containers_he_names(tmp_path: Path, name: str, above: str) -> None:
    assert tenant_of(process_in(tmp_path, f"{above}{OWN}/app.slice/{name}"), 42) == Tenant(5000)


@pytest.mark.parametrize(
    "name", [f"kubepods/burstable/pod{POD}/{CONTAINER}", f"kubepods-pod{POD}.slice", f"pod{POD}", f"a/pod{POD}"]
)
@pytest.mark.parametrize("above", ["", "/../.."])
def test_no_pod_is_believed_that_a_user_names(name: str, above: str) -> None:
    assert place_of_cgroup(f"{above}{OWN}/{name}").pod_uid == ""
    assert place_of_cgroup(f"1:name=systemd:{OWN}/{name}\n0::/\n").pod_uid == ""


@pytest.mark.parametrize("name", ["slurm/uid_0/job_7/step_0", "pbs.service/jobid/7.server"])
def test_no_job_is_believed_that_a_user_names(name: str) -> None:
    assert job_facts({}, f"0::{OWN}/{name}\n") == JobFacts()


def test_a_job_below_the_system_and_a_rootless_container_are_known_as_ever() -> None:
    assert job_facts({}, "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n").job == "7"
    assert job_facts({}, f"0::{OWN}/user.slice/libpod-{CONTAINER}.scope\n").container_id == CONTAINER
    inside = f"0::/kubepods/pod{POD}/{CONTAINER}{OWN}/app.slice\n"
    assert place_of_cgroup(inside).pod_uid == POD
