"""Job facts from environments and control groups as the batch systems write them (typed from their documentation)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.targets.jobs import NCCL_SETTINGS, JobFacts, job_facts
from railscope.agent.node.targets.pods import PodNames

UID = "0a1b2c3d-1111-2222-3333-445566778899"
CONTAINER = "3f" * 32

SLURM_STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "llama",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "11",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_JOB_USER": "ada",
}


def test_a_slurm_task_is_known_by_job_step_and_rank() -> None:
    facts = job_facts(SLURM_STEP, "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_3\n")
    assert facts.labels() == (
        ("job", "4711"),
        ("job_name", "llama"),
        ("scheduler", "slurm"),
        ("world_rank", "11"),
        ("world_size", "16"),
        ("local_rank", "3"),
        ("step", "0"),
        ("user", "ada"),
    )


@pytest.mark.parametrize(
    ("cgroup", "step"),
    [
        ("12:cpuset:/slurm/uid_1000/job_4711/step_0/task_3\n0::/\n", "0"),
        ("12:devices:/slurm_node7/uid_1000/job_4711/step_batch/task_0\n", "batch"),
        ("0::/system.slice/node7_slurmstepd.scope/job_4711/step_extern/user/task_special\n", "extern"),
    ],
)
def test_the_control_group_alone_tells_slurms_job_and_step(cgroup: str, step: str) -> None:
    facts = job_facts({}, cgroup)
    assert (facts.scheduler, facts.job, facts.step) == ("slurm", "4711", step)
    assert facts.user == ("1000" if "uid_" in cgroup else "")


def test_variables_of_another_slurm_job_are_not_believed() -> None:
    facts = job_facts(SLURM_STEP, "0::/system.slice/slurmstepd.scope/job_9/step_1/user/task_0\n")
    assert facts == JobFacts(scheduler="slurm", job="9", step="1")


def test_slurms_task_number_of_a_batch_script_is_no_rank() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert job_facts(batch, "").world_rank == ""
    assert job_facts(batch | {"SLURM_STEP_ID": "4294967291"}, "").labels() == (
        ("job", "7"),
        ("scheduler", "slurm"),
        ("step", "batch"),
    )
    assert job_facts(batch | {"SLURM_STEP_ID": "0"}, "").world_rank == "0"


def test_torchrun_below_slurm_tells_the_rank_and_slurm_the_job() -> None:
    facts = job_facts(
        SLURM_STEP | {"RANK": "93", "WORLD_SIZE": "128", "LOCAL_RANK": "5", "TORCHELASTIC_RUN_ID": "run1"}, ""
    )
    assert (facts.scheduler, facts.job) == ("slurm", "4711")
    assert (facts.world_rank, facts.world_size, facts.local_rank) == ("93", "128", "5")


def test_an_array_task_is_named_as_slurm_names_it() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "7"}
    assert job_facts(SLURM_STEP | array, "").array == "4700_7"
    assert job_facts(SLURM_STEP | {"SLURM_ARRAY_TASK_ID": "7"}, "").array == ""


UNDERSCORED = UID.replace("-", "_")


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{CONTAINER}.scope\n",
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{CONTAINER}.scope/container\n",
        f"11:memory:/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/docker-{CONTAINER}.scope\n",
        f"0::/kubepods/burstable/pod{UID}/{CONTAINER}\n",
        f"11:cpu,cpuacct:/kubepods/pod{UID}/{CONTAINER}\n1:name=systemd:/kubepods/pod{UID}/{CONTAINER}\n0::/\n",
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{UNDERSCORED}.slice:cri-containerd:{CONTAINER}\n",
        f"0::/docker/{'a' * 64}/kubelet.slice/kubelet-kubepods-pod{UNDERSCORED}.slice/crio-{CONTAINER}.scope\n",
        f"0::/../../pod{UID}/{CONTAINER}\n",
        f"0::/../../../burstable/pod{UID}/{CONTAINER}\n",
        f"0::/../../kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{CONTAINER}.scope\n",
        f"0::/kubepods/pod{UID}/{CONTAINER}/kubepods/pod{'9' * 32}/{'9' * 64}\n",
    ],
)
def test_every_runtime_and_cgroup_driver_tells_pod_and_container(cgroup: str) -> None:
    facts = job_facts({"HOSTNAME": "trainer-worker-3"}, cgroup)
    assert facts == JobFacts(scheduler="kubernetes", pod="trainer-worker-3", container_id=CONTAINER, pod_uid=UID)


def test_a_static_pods_identifier_has_no_dashes() -> None:
    assert job_facts({}, f"0::/kubepods/pod{'0f' * 16}/{CONTAINER}\n").pod_uid == "0f" * 16


def test_the_downward_variables_name_the_pod() -> None:
    facts = job_facts(
        {"POD_NAME": "worker-0", "POD_NAMESPACE": "research", "HOSTNAME": "elsewhere", "KUBERNETES_SERVICE_HOST": "x"},
        "",
    )
    assert facts.labels() == (("scheduler", "kubernetes"), ("pod", "worker-0"), ("namespace", "research"))


def test_the_kubelets_names_are_believed_before_the_variables() -> None:
    claims = {"POD_NAME": "other", "POD_NAMESPACE": "theirs", "HOSTNAME": "gpu-17", "KUBERNETES_SERVICE_HOST": "x"}
    facts = job_facts(claims, f"0::/kubepods/pod{UID}/{CONTAINER}\n", "gpu-17", PodNames("ml", "train-0", "pytorch"))
    assert (facts.namespace, facts.pod, facts.container, facts.container_id) == ("ml", "train-0", "pytorch", CONTAINER)


def test_what_a_pod_is_called_is_unknown_and_not_missing_where_nobody_tells() -> None:
    """A label that is missing becomes the agent's own pod in Prometheus."""
    labels = dict(job_facts({"HOSTNAME": "gpu-17"}, f"0::/kubepods/pod{UID}/{CONTAINER}\n", "gpu-17").labels())
    assert (labels["namespace"], labels["pod"], labels["container"]) == ("unknown",) * 3
    assert "pod" not in dict(job_facts({}, f"0::/docker/{CONTAINER}\n").labels())


def test_the_object_that_owns_a_pod_is_its_job_unless_a_batch_system_tells_of_one() -> None:
    environment = {"MASTER_ADDR": "pretrain-master-0", "TORCHELASTIC_RUN_ID": "f3a9-of-each-pod", "RANK": "3"}
    cgroup = f"0::/kubepods/pod{UID}/{CONTAINER}\n"
    facts = job_facts(environment, cgroup)
    assert (facts.job, facts.owner_kind, facts.owner_name) == ("pretrain", "PyTorchJob", "pretrain")
    assert job_facts(environment | {"SLURM_JOB_ID": "7"}, cgroup).job == "7"
    ray = job_facts({"RAY_JOB_ID": "01000000", "RAY_CLUSTER_NAME": "rc"}, cgroup)
    assert (ray.job, ray.owner_kind, ray.owner_name) == ("01000000", "RayCluster", "rc")
    assert job_facts(environment, "0::/user.slice\n").owner_kind == ""


def test_slurms_account_is_a_label() -> None:
    assert job_facts(SLURM_STEP | {"SLURM_JOB_ACCOUNT": "physics"}, "").account == "physics"


def test_the_hosts_own_name_is_no_pods_name() -> None:
    cgroup = f"0::/kubepods/pod{UID}/{CONTAINER}\n"
    assert job_facts({"HOSTNAME": "gpu-17"}, cgroup, node_name="gpu-17.cluster.example").pod == ""
    assert job_facts({"HOSTNAME": "worker-0"}, cgroup, node_name="gpu-17").pod == "worker-0"


@pytest.mark.parametrize("host_name", ["", "Not A Pod", "-x", "x_y"])
def test_a_host_name_that_no_pod_can_have_is_no_pods_name(host_name: str) -> None:
    assert job_facts({"HOSTNAME": host_name}, f"0::/kubepods/pod{UID}/{CONTAINER}\n").pod == ""


def test_outside_kubernetes_the_host_name_and_pod_variables_say_nothing() -> None:
    assert job_facts({"HOSTNAME": "node1", "POD_NAME": "x"}, "0::/user.slice/session-1.scope\n") == JobFacts()


@pytest.mark.parametrize("path", [f"/docker/{CONTAINER}", f"/system.slice/docker-{CONTAINER}.scope"])
def test_a_plain_container_is_known_by_its_identifier(path: str) -> None:
    assert job_facts({}, f"0::{path}\n") == JobFacts(container_id=CONTAINER)


def test_torchrun_alone() -> None:
    facts = job_facts({"TORCHELASTIC_RUN_ID": "exp9", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "")
    assert facts == JobFacts(scheduler="torchrun", job="exp9", world_rank="0", world_size="2", local_rank="0")


def test_torchruns_default_run_identifier_is_no_job() -> None:
    assert job_facts({"TORCHELASTIC_RUN_ID": "none"}, "") == JobFacts(scheduler="torchrun")


def test_ranks_without_a_launcher_we_know_are_still_ranks() -> None:
    assert job_facts({"RANK": "1", "WORLD_SIZE": "2"}, "") == JobFacts(world_rank="1", world_size="2")


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            ("3", "4", "1"),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, ("3", "4", "1")),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-a-1@1"}, ("3", "", "")),
    ],
)
def test_mpi_launchers(variables: dict[str, str], ranks: tuple[str, str, str]) -> None:
    facts = job_facts(variables, "")
    assert facts.scheduler == "mpi"
    assert (facts.world_rank, facts.world_size, facts.local_rank) == ranks
    assert facts.job == variables.get("PMIX_NAMESPACE", "")


def test_lsf_and_pbs_jobs() -> None:
    lsf = job_facts({"LSB_JOBID": "88", "LSB_JOBNAME": "fit", "LSB_JOBINDEX": "3", "LSFUSER": "ada"}, "")
    assert lsf == JobFacts(scheduler="lsf", job="88", job_name="fit", array="88[3]", user="ada")
    assert job_facts({"LSB_JOBID": "88", "LSB_JOBINDEX": "0"}, "").array == ""
    pbs = job_facts(
        {"PBS_JOBID": "12[4].head", "PBS_JOBNAME": "fit", "PBS_ARRAY_ID": "12[].head", "PBS_ARRAY_INDEX": "4"}, ""
    )
    assert pbs == JobFacts(scheduler="pbs", job="12[4].head", job_name="fit", array="12[4]")
    assert job_facts({}, "4:memory:/pbs_jobs.service/jobid/12.head\n").job == "12.head"


def test_ray_workers_name_their_job_and_cluster() -> None:
    facts = job_facts({"RAY_JOB_ID": "01000000", "RAY_CLUSTER_NAME": "rc"}, "")
    assert facts == JobFacts(scheduler="ray", job="01000000", job_name="rc")


@pytest.mark.parametrize("rank", ["-1", "two", "٣", "4", ""])
def test_a_rank_that_cannot_be_is_left_out(rank: str) -> None:
    assert job_facts({"RANK": rank, "WORLD_SIZE": "4"}, "").labels() == ()


def test_a_contradictory_family_gives_way_to_the_next() -> None:
    facts = job_facts({"RANK": "9", "WORLD_SIZE": "4", "PMI_RANK": "1", "PMI_SIZE": "4"}, "")
    assert (facts.world_rank, facts.world_size) == ("1", "4")


def test_the_settings_that_decide_rails_are_kept_and_no_label() -> None:
    facts = job_facts({"NCCL_IB_HCA": "=mlx5_0,mlx5_3", "NCCL_SOCKET_IFNAME": "rail0", "NCCL_DEBUG": "INFO"}, "")
    assert facts.nccl_settings == (("NCCL_SOCKET_IFNAME", "rail0"), ("NCCL_IB_HCA", "=mlx5_0,mlx5_3"))
    assert facts.labels() == ()


def test_values_are_cut_and_lose_what_a_terminal_would_obey() -> None:
    facts = job_facts({"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "\x1b[31mred\r\n\u202e\udc80 " + "x" * 500}, "")
    assert facts.job_name == "[31mred " + "x" * 120


INTERESTING = sorted(
    {*SLURM_STEP, *NCCL_SETTINGS, "RANK", "WORLD_SIZE", "HOSTNAME", "POD_NAME", "KUBERNETES_SERVICE_HOST", "LSB_JOBID"}
    | {"PBS_JOBID", "PBS_ARRAY_ID", "PBS_ARRAY_INDEX", "RAY_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_RANK", "PMI_SIZE", ""}
)
anything = st.text(st.characters(exclude_categories=()), max_size=300)
paths = st.lists(
    st.sampled_from(
        ["/", "slurm", "job_", "kubepods", "-pod", "pod", UID, CONTAINER, "7", "step_", ".slice", "\n", ":"]
    ),
    max_size=30,
).map("".join)


@given(
    environment=st.dictionaries(st.sampled_from(INTERESTING) | anything, anything | st.sampled_from(["0", "7"])),
    cgroup=anything | paths,
    node_name=anything,
)
def test_any_environment_gives_bounded_printable_labels(
    environment: dict[str, str], cgroup: str, node_name: str
) -> None:
    facts = job_facts(environment, cgroup, node_name)
    for _, value in (*facts.labels(), *facts.nccl_settings):
        assert 0 < len(value) <= 128
        assert value.isprintable()


@given(secret=st.text(st.characters(categories=["L"]), min_size=12), name=st.text(min_size=1))
def test_no_other_variable_is_ever_shown(secret: str, name: str) -> None:
    environment = SLURM_STEP | {f"MY_{name}": secret, "NCCL_DEBUG_FILE": secret, "SLURM_JWT": secret}
    assert secret not in repr(job_facts(environment, ""))
