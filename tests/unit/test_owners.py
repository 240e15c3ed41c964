"""Which Kubernetes object owns a pod, from environments as its operator makes them (typed from their sources)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.targets.environment import Variables
from railscope.agent.node.targets.owners import NOBODY, Owner, find_owner

MASTER = {"MASTER_ADDR": "pretrain-master-0", "MASTER_PORT": "23456", "RANK": "3", "WORLD_SIZE": "8"}
ELASTIC = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "pretrain-worker-0:29400", "PET_NNODES": "2:4"}
INDEXED = {"JOB_COMPLETION_INDEX": "3"}
JOBSET = INDEXED | {"MASTER_ADDR": "net-jobset-workers-0-0.net-jobset"}
TRAINJOB = INDEXED | {"PET_MASTER_ADDR": "torch-llm-node-0-0.torch-llm", "PET_NNODES": "4"}
LWS = {"LWS_LEADER_ADDRESS": "vllm-1.vllm.inference", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
RAY = {"RAY_CLUSTER_NAME": "raycluster-kuberay", "RAY_IP": "raycluster-kuberay-head-svc"}
VOLCANO = {"VC_TASK_INDEX": "1", "MASTER_ADDR": "fit-master-0.fit"}

OPERATORS = [
    ({**MASTER}, "pretrain-worker-3", Owner("PyTorchJob", "pretrain")),
    ({**ELASTIC}, "pretrain-worker-1", Owner("PyTorchJob", "pretrain")),
    ({**INDEXED}, "fit-3-x7f2k", Owner("Job", "fit")),
    ({**JOBSET}, "net-jobset-workers-0-3-q8s5d", Owner("JobSet", "net-jobset")),
    ({**INDEXED, "JOBSET_NAME": "big"}, "big-workers-0-3-q8s5d", Owner("JobSet", "big")),
    ({**TRAINJOB}, "torch-llm-node-0-3-q8s5d", Owner("JobSet", "torch-llm")),
    ({**LWS}, "vllm-1-1", Owner("LeaderWorkerSet", "vllm")),
    ({**RAY}, "raycluster-kuberay-workergroup-worker-9x2zz", Owner("RayCluster", "raycluster-kuberay")),
    ({**VOLCANO}, "fit-worker-1", Owner("Job", "fit")),
]


@pytest.mark.parametrize(("environment", "pod", "owner"), OPERATORS, ids=lambda value: str(value)[:40])
def test_each_operators_object_is_named(environment: dict[str, str], pod: str, owner: Owner) -> None:
    assert find_owner(Variables(environment), pod, "") == owner


@pytest.mark.parametrize(("environment", "owner"), [(one[0], one[2]) for one in OPERATORS])
def test_an_object_of_which_the_kubelets_name_of_the_pod_says_nothing_is_not_believed(
    environment: dict[str, str], owner: Owner
) -> None:
    found = find_owner(Variables(environment), "other-pod", "")
    assert found == (owner if owner.kind == "RayCluster" else NOBODY), "KubeRay shortens long names"


def test_where_no_kubelet_names_the_pod_the_variables_alone_tell_and_a_job_by_its_host_name() -> None:
    assert find_owner(Variables(MASTER), "", "") == Owner("PyTorchJob", "pretrain")
    assert find_owner(Variables(INDEXED), "", "fit-3") == Owner("Job", "fit")
    assert find_owner(Variables(INDEXED), "", "") == NOBODY
    assert find_owner(Variables(INDEXED), "", "gpu-a") == NOBODY


@pytest.mark.parametrize(
    "environment",
    [
        {"MASTER_ADDR": "10.0.0.7"},
        {"MASTER_ADDR": "localhost"},
        {"MASTER_ADDR": "-master-0"},
        {"MASTER_ADDR": "Pre\x1b[31m-master-0"},
        {"LWS_LEADER_ADDRESS": "vllm"},
        {"RAY_CLUSTER_NAME": "no name of an object"},
        {"JOB_COMPLETION_INDEX": "three"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_what_no_operator_sets_names_no_object(environment: dict[str, str]) -> None:
    assert find_owner(Variables(environment), "", "pod-3") == NOBODY


_names = st.sampled_from([*MASTER, *ELASTIC, *JOBSET, *LWS, *RAY, *VOLCANO, "JOBSET_NAME", "COORDINATOR_ADDRESS"])
_values = st.text(max_size=300) | st.from_regex(r"([a-z0-9-]{0,20}[.:]?){0,30}", fullmatch=True)


@given(environment=st.dictionaries(_names, _values), pod=st.text(max_size=20), host_name=st.text(max_size=20))
def test_any_environment_names_a_bounded_object_or_none(environment: dict[str, str], pod: str, host_name: str) -> None:
    owner = find_owner(Variables(environment), pod, host_name)
    assert len(owner.name) <= 128
    assert bool(owner.kind) == bool(owner.name)
