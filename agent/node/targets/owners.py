"""Which Kubernetes object a pod works for, from the variables that its operator sets.

`kube_pod_owner` of kube-state-metrics has the same kinds and names, for joins.  A container's environment is what its
owner says, so where the kubelet tells the pod's name, only an object counts from whose name the operator would have
made it.  What two operators could have set is nobody's.

Sources: the Job controller (`JOB_COMPLETION_INDEX`, pods `JOB-INDEX-xxxxx`); Kubeflow's training operator
(`MASTER_ADDR` is `JOB-master-0`, for elastic jobs `PET_RDZV_ENDPOINT` is `JOB-worker-0:PORT`; pods `JOB-worker-N`);
JobSet (pods `SET-JOB-N-INDEX-xxxxx`, their addresses `SET-JOB-N-INDEX.SET`); LeaderWorkerSet (`LWS_LEADER_ADDRESS` is
`SET-GROUP.SET.NAMESPACE`); KubeRay (`RAY_CLUSTER_NAME`); Volcano (`VC_TASK_INDEX`, addresses `JOB-TASK-N.JOB`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from railscope.agent.node.targets.environment import Variables

_NAME: Final = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_MASTER: Final = re.compile(rf"({_NAME})-master-0")
_FIRST_WORKER: Final = re.compile(rf"({_NAME})-worker-0")
_LEADER: Final = re.compile(rf"({_NAME})-\d+\.({_NAME})(?:\..*)?")
_IN_DOMAIN: Final = re.compile(rf"({_NAME})\.({_NAME})(?:[.:].*)?")
_ADDRESSES: Final = ("PET_MASTER_ADDR", "MASTER_ADDR", "COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")


@dataclass(frozen=True, slots=True)
class Owner:
    """An object of the API server; empty: not known."""

    kind: str = ""
    """As in `kube_pod_owner`: Job, PyTorchJob, JobSet, RayCluster, LeaderWorkerSet."""
    name: str = ""


NOBODY: Final = Owner()


def find_owner(variables: Variables, pod: str, host_name: str) -> Owner:
    """The object that a pod works for; `pod`: what the kubelet calls it, empty: not known.

    `host_name`: its own; empty: it has the node's.
    """
    for owner in (
        _leader_worker_set(variables),
        _ray_cluster(variables),
        _volcano_job(variables),
        _job_set(variables),
        _pytorch_job(variables),
        _job(variables, pod, host_name.partition(".")[0]),
    ):
        # KubeRay shortens names that are long.
        if owner.name and (not pod or owner.kind == "RayCluster" or pod.startswith(f"{owner.name}-")):
            return owner
    return NOBODY


def _leader_worker_set(variables: Variables) -> Owner:
    leader = _LEADER.fullmatch(variables.text("LWS_LEADER_ADDRESS"))
    return Owner("LeaderWorkerSet", leader[1]) if leader else NOBODY


def _ray_cluster(variables: Variables) -> Owner:
    cluster = variables.text("RAY_CLUSTER_NAME")
    return Owner("RayCluster", cluster) if re.fullmatch(_NAME, cluster) else NOBODY


def _volcano_job(variables: Variables) -> Owner:
    address = _IN_DOMAIN.fullmatch(variables.text("MASTER_ADDR"))
    if not (variables.number("VC_TASK_INDEX") or variables.number("VK_TASK_INDEX")) or address is None:
        return NOBODY
    host, job = address.groups()
    return Owner("Job", job) if host.startswith(f"{job}-") else NOBODY


def _job_set(variables: Variables) -> Owner:
    if not variables.number("JOB_COMPLETION_INDEX"):
        return NOBODY
    named = variables.text("JOBSET_NAME")
    if re.fullmatch(_NAME, named):
        return Owner("JobSet", named)
    for address in _ADDRESSES:
        found = _IN_DOMAIN.fullmatch(variables.text(address))
        # Indexed jobs have two parts less in their pods' names.
        if found and re.fullmatch(rf"{re.escape(found[2])}-{_NAME}-\d+-\d+", found[1]):
            return Owner("JobSet", found[2])
    return NOBODY


def _pytorch_job(variables: Variables) -> Owner:
    if variables.number("JOB_COMPLETION_INDEX") or variables.has("VC_TASK_INDEX"):
        return NOBODY
    master = _MASTER.fullmatch(variables.text("MASTER_ADDR"))
    worker = _FIRST_WORKER.fullmatch(variables.text("PET_RDZV_ENDPOINT").partition(":")[0])
    found = master or worker
    return Owner("PyTorchJob", found[1]) if found else NOBODY


def _job(variables: Variables, pod: str, host: str) -> Owner:
    index = variables.number("JOB_COMPLETION_INDEX")
    if not index:
        return NOBODY
    of_pod = re.fullmatch(rf"({_NAME})-{index}-[a-z0-9]{{5}}", pod)
    of_host = re.fullmatch(rf"({_NAME})-{index}", host)
    found = of_pod or (None if pod else of_host)
    return Owner("Job", found[1]) if found else NOBODY
