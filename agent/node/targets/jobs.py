"""Which job a process belongs to, from its environment and its control group.

Batch systems and launchers describe a process twice: in variables that they set when they start it, and (Slurm, PBS,
Kubernetes, container engines) in the path of its control group.  The path comes from the system, the variables can be
changed by the user, so for job, pod and container the path is believed first.  Of names in a path the outermost count:
who is given a part of the tree may name what is below it as he likes; below a user's own systemd none of a job or a
pod is believed, and of a container, which may be rootless, the identifier alone.  Names of pods and containers are the
kubelet's (agent/node/targets/pods.py), and the variables' where it has none.

Only the variables named here are looked at: an environment holds secrets, and nothing else of it may reach a metric.
What is not known is left out, never guessed: a rank that contradicts its own world size, or a host's name that only
looks like a pod's, is not known.  A process in a pod without a name says `unknown` for it: a label that is missing
would be filled in by Prometheus with the name of the agent's own pod.

Sources: sbatch(1), srun(1) and Slurm's cgroup documentation; Kubernetes' kubelet (pkg/kubelet/cm, both cgroup
drivers) with containerd, CRI-O and Docker; torchrun's elastic agent; Open MPI, PMIx and MPICH (Hydra); bsub(1);
qsub(1B).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import Labels
from railscope.agent.node.targets.environment import Variables, clean
from railscope.agent.node.targets.owners import find_owner
from railscope.agent.node.targets.pods import PodNames
from railscope.probes.processes.processes import system_part

_LONGEST_CGROUP: Final = 65_536

NCCL_SETTINGS: Final = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET")
"""NCCL's variables that decide which rails a job uses, and how."""

_SLURM_CGROUP: Final = re.compile(r"/[^/]*slurm[^/]*(?:/uid_(\d+))?/job_(\d+)(?:/step_(\w+))?")
"""v1: /slurm/uid_1000/job_7/step_0/task_0; v2: /system.slice/slurmstepd.scope/job_7/step_batch/user/task_0."""

_PBS_CGROUP: Final = re.compile(r"/pbs[^/]*(?:/jobid)?/(\d+(?:\[\d*\])?\.[\w.-]+)")

_POD_CGROUP: Final = re.compile(
    r"(?:kubepods\S*?[/-]|/\.\./(?:\S*?/)?)"
    r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|[/:\n]|$)"
)
"""kubepods-burstable-pod<uid with _>.slice (systemd driver), kubepods/burstable/pod<uid> (cgroupfs driver).

An agent in a container with a cgroup namespace of its own sees the paths of others from there, as /../../pod<uid>.
"""

_CONTAINER_CGROUP: Final = re.compile(r"(?:[/:-])([0-9a-f]{64})(?:\.scope)?(?=[/\n]|$)")
"""cri-containerd-<id>.scope, crio-<id>.scope, docker-<id>.scope, libpod-<id>.scope, or the bare id (cgroupfs)."""

_MACHINE_CGROUP: Final = re.compile(r"/(?:machine\.slice|lxc|lxc\.payload[^/]*|docker)(?=[/\n]|$)")
"""systemd-nspawn, libvirt, LXC."""

_POD_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class _RankVariables:
    rank: str
    world_size: str
    local_rank: str


_RANK_FAMILIES: Final = (
    _RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Ray Train, Kubeflow, Volcano, DeepSpeed
    _RankVariables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _RankVariables("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    _RankVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    _RankVariables("PMIX_RANK", "", ""),
)
_SLURM_RANKS: Final = _RankVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
"""Believed last: a task of a Slurm step is often a launcher of several ranks, which sets the variables above."""

_SLURM_STEPS: Final = {"4294967290": "interactive", "4294967291": "batch", "4294967292": "extern"}
"""Names of the steps that have a reserved number (slurm/slurm.h)."""
_NOT_A_TASK: Final = frozenset({*_SLURM_STEPS.values(), ""})
"""Steps that start one process and not one a rank; empty: no step at all."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of a process's job; empty: not known."""

    job: str = ""
    """The batch system's identifier, or the launcher's run identifier."""
    job_name: str = ""
    scheduler: str = ""
    """Who placed the process: slurm, kubernetes, lsf, pbs, ray, torchrun, mpi."""
    pod: str = ""
    namespace: str = ""
    container: str = ""
    """What the pod calls the container."""
    container_id: str = ""
    """The container's full identifier, as in the engine's and cAdvisor's output."""
    owner_kind: str = ""
    """Of the Kubernetes object that the pod works for, as in `kube_pod_owner`."""
    owner_name: str = ""
    world_rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    step: str = ""
    """Slurm's step: a number, `batch`, `interactive` or `extern`."""
    array: str = ""
    """Job and task of a job array, in the batch system's notation (`100_7`, `100[7]`)."""
    user: str = ""
    account: str = ""
    """That the batch system charges."""
    pod_uid: str = ""
    nccl_settings: tuple[tuple[str, str], ...] = ()
    """Those of `NCCL_SETTINGS` that are set."""

    def labels(self) -> Labels:
        """What is known, under stable names in a stable order; without the NCCL settings."""
        unknown = dict.fromkeys(_NAMES_IN_POD, UNKNOWN) if self.pod_uid else {}
        known = ((name, getattr(self, name) or unknown.get(name, "")) for name in _LABELS)
        return tuple((name, value) for name, value in known if value)


_LABELS: Final = (
    "job",
    "job_name",
    "scheduler",
    "pod",
    "namespace",
    "container",
    "container_id",
    "owner_kind",
    "owner_name",
    "world_rank",
    "world_size",
    "local_rank",
    "step",
    "array",
    "user",
    "account",
    "pod_uid",
)
_NAMES_IN_POD: Final = ("pod", "namespace", "container")


@dataclass(frozen=True, slots=True)
class ContainerPlace:
    """Where a process runs, by the path of its control group."""

    cgroup: str
    """The part that the system named."""
    pod_uid: str
    """As the API server writes it; empty: in no pod."""
    container_id: str
    """Empty: in no container."""


def place_of_cgroup(cgroup: str) -> ContainerPlace:
    """The pod and the container of a path, or of the text of a /proc/PID/cgroup; the outermost of each counts."""
    cgroup = cgroup[:_LONGEST_CGROUP]
    system = system_part(cgroup)
    pod = _POD_CGROUP.search(system)
    container = _CONTAINER_CGROUP.search(cgroup, pod.end() if pod else 0)
    return ContainerPlace(system, pod[1].replace("_", "-") if pod else "", container[1] if container else "")


def job_facts(
    environment: Mapping[str, str], cgroup: str, node_name: str = "", names: PodNames | None = None
) -> JobFacts:
    """Which job a process belongs to, from its environment and the text of its /proc/PID/cgroup.

    `node_name` is this host's name: pods in the host's network have it in HOSTNAME, where others have the pod's.
    `names`: what the kubelet calls its pod; None: it is not known.  Never raises, whatever the process put into its
    environment.
    """
    variables, place = Variables(environment), place_of_cgroup(cgroup)
    batch = _slurm(variables, place.cgroup) or _lsf(variables) or _pbs(variables, place.cgroup)
    pod = _pod(variables, place, node_name, names)
    launcher = _launcher(variables)
    scheduler = batch.scheduler or pod.scheduler or launcher.scheduler
    world_rank, world_size, local_rank = _ranks(variables, batch)
    return JobFacts(
        # A cluster of Ray runs many jobs; what else owns a pod is the job, where a run's identifier is a pod's own.
        job=batch.job or ("" if pod.owner_kind == "RayCluster" else pod.owner_name) or launcher.job or pod.owner_name,
        job_name=batch.job_name or launcher.job_name,
        scheduler=scheduler,
        pod=pod.pod,
        namespace=pod.namespace,
        container=pod.container,
        container_id=place.container_id,
        owner_kind=pod.owner_kind,
        owner_name=pod.owner_name,
        world_rank=world_rank,
        world_size=world_size,
        local_rank=local_rank,
        step=batch.step,
        array=batch.array,
        user=batch.user,
        account=batch.account,
        pod_uid=pod.pod_uid,
        nccl_settings=tuple((name, value) for name in NCCL_SETTINGS if (value := variables.text(name))),
    )


def is_confined(cgroup: str | None) -> bool:
    """Whether who started a process may have given it a part of this host's devices only; None: it is not known.

    Container engines do, and so do batch systems that constrain devices (cgroup.conf(5), ConstrainDevices): NVML in
    the process then numbers GPUs in its own way.
    """
    kinds = (_POD_CGROUP, _CONTAINER_CGROUP, _SLURM_CGROUP, _PBS_CGROUP, _MACHINE_CGROUP)
    return cgroup is None or any(kind.search(cgroup[:_LONGEST_CGROUP]) for kind in kinds)


def _slurm(variables: Variables, cgroup: str) -> JobFacts | None:
    found = _SLURM_CGROUP.search(cgroup)
    uid, job, step = (clean(part) for part in found.groups("")) if found else ("", "", "")
    if not _own_slurm_variables(variables, job):
        return JobFacts(scheduler="slurm", job=job, step=step, user=uid)
    job = job or _slurm_job(variables)
    if not job:
        return None
    array_job, array_task = variables.number("SLURM_ARRAY_JOB_ID"), variables.number("SLURM_ARRAY_TASK_ID")
    named_step = variables.text("SLURM_STEP_ID", "SLURM_STEPID")
    return JobFacts(
        scheduler="slurm",
        job=job,
        job_name=variables.text("SLURM_JOB_NAME"),
        step=step or _SLURM_STEPS.get(named_step, named_step),
        array=clean(f"{array_job}_{array_task}") if array_job and array_task else "",
        user=variables.text("SLURM_JOB_USER", "SLURM_JOB_UID") or uid,
        account=variables.text("SLURM_JOB_ACCOUNT"),
    )


def _slurm_job(variables: Variables) -> str:
    return variables.number("SLURM_JOB_ID") or variables.number("SLURM_JOBID")


def _own_slurm_variables(variables: Variables, job: str) -> bool:
    """Whether Slurm's variables are of this job: false if they name another one (inherited, or changed)."""
    return not job or _slurm_job(variables) in ("", job)


def _lsf(variables: Variables) -> JobFacts | None:
    job = variables.number("LSB_JOBID")
    if not job:
        return None
    index = variables.number("LSB_JOBINDEX")
    return JobFacts(
        scheduler="lsf",
        job=job,
        job_name=variables.text("LSB_JOBNAME"),
        array=clean(f"{job}[{index}]") if index not in ("", "0") else "",
        user=variables.text("LSFUSER"),
    )


def _pbs(variables: Variables, cgroup: str) -> JobFacts:
    found = _PBS_CGROUP.search(cgroup)
    job = clean(found[1]) if found else variables.text("PBS_JOBID")
    if not job:
        return JobFacts()
    array, index = variables.text("PBS_ARRAY_ID"), variables.number("PBS_ARRAY_INDEX")
    return JobFacts(
        scheduler="pbs",
        job=job,
        job_name=variables.text("PBS_JOBNAME"),
        array=clean(f"{array.partition('[')[0]}[{index}]") if array and index else "",
        user=variables.text("PBS_O_LOGNAME"),
    )


def _pod(variables: Variables, place: ContainerPlace, node_name: str, names: PodNames | None) -> JobFacts:
    if not place.pod_uid and not variables.has("KUBERNETES_SERVICE_HOST"):
        return JobFacts()
    host_name = variables.text("HOSTNAME")
    own_host_name = host_name if host_name.partition(".")[0] != node_name.partition(".")[0] else ""
    pod = variables.text("POD_NAME", "MY_POD_NAME", "K8S_POD_NAME")
    if not pod and _POD_NAME.fullmatch(own_host_name):
        pod = own_host_name
    owner = find_owner(variables, names.pod if names is not None else "", own_host_name)
    return JobFacts(
        scheduler="kubernetes",
        pod=names.pod if names is not None else pod,
        namespace=names.namespace if names is not None else _namespace(variables),
        container=names.container if names is not None else "",
        owner_kind=owner.kind,
        owner_name=owner.name,
        pod_uid=place.pod_uid,
    )


def _namespace(variables: Variables) -> str:
    return variables.text("POD_NAMESPACE", "MY_POD_NAMESPACE", "K8S_POD_NAMESPACE")


def _launcher(variables: Variables) -> JobFacts:
    """The launcher that started the ranks inside the allocation or pod."""
    ray_job, ray_cluster = variables.text("RAY_JOB_ID"), variables.text("RAY_CLUSTER_NAME")
    if ray_job or ray_cluster:
        return JobFacts(scheduler="ray", job=ray_job, job_name=ray_cluster)
    if variables.has("TORCHELASTIC_RUN_ID"):
        run = variables.text("TORCHELASTIC_RUN_ID")
        return JobFacts(scheduler="torchrun", job="" if run == "none" else run)  # "none": torchrun's own default
    if any(variables.has(family.rank) for family in _RANK_FAMILIES[1:]):
        return JobFacts(scheduler="mpi", job=variables.text("PMIX_NAMESPACE"))
    return JobFacts()


def _ranks(variables: Variables, batch: JobFacts) -> tuple[str, str, str]:
    """World rank, world size and local rank, all of one family of variables that does not contradict itself."""
    slurm_task = batch.step not in _NOT_A_TASK and _own_slurm_variables(variables, batch.job)
    for family in (*_RANK_FAMILIES, _SLURM_RANKS) if slurm_task else _RANK_FAMILIES:
        rank, size = variables.number(family.rank), variables.number(family.world_size)
        if rank and not (size and int(rank) >= int(size)):
            return rank, size, variables.number(family.local_rank)
    return "", "", ""
