"""Names of pods and containers from the kubelet's folders of logs, as containerd, CRI-O and Docker leave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.node.inspection.questions import Memory
from railscope.agent.node.targets.pods import PodNames, find_pod_names
from railscope.agent.node.targets.processes import Describe
from railscope.probes.processes.processes import identity_of

UID = "0b1c2d3e-1111-2222-3333-444455556666"
CONTAINER, SIDECAR = "ab" * 32, "cd" * 32


class Kubelet:
    """The folders of logs of a node, in a folder of a test."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "pods"
        self.links = root / "containers"
        self.folder.mkdir()
        self.links.mkdir()

    def start(self, namespace: str, pod: str, uid: str, **containers: str) -> None:
        """A pod with these containers; those without an identifier were not started."""
        for name, identifier in containers.items():
            log = self.folder / f"{namespace}_{pod}_{uid}" / name / "0.log"
            log.parent.mkdir(parents=True)
            log.touch()
            if identifier:
                link = f"{pod}_{namespace}_{name}-{identifier}"[:251] + ".log"
                (self.links / link).symlink_to(log)


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    return Kubelet(tmp_path)


def test_a_pod_and_its_only_container_have_the_names_that_the_kubelet_gives_them(kubelet: Kubelet) -> None:
    kubelet.start("kube-system", "proxy-x", "11111111-2222-2222-3333-444455556666", proxy=SIDECAR)
    kubelet.start("ml", "pretrain-worker-3", UID, pytorch="")
    assert find_pod_names(kubelet.folder, UID, CONTAINER) == PodNames("ml", "pretrain-worker-3", "pytorch")
    assert find_pod_names(kubelet.folder, UID, "") == PodNames("ml", "pretrain-worker-3", "pytorch")


def test_of_several_containers_the_one_with_the_identifier_is_named(kubelet: Kubelet) -> None:
    kubelet.start("ml", "train-0", UID, init="ef" * 32, pytorch=CONTAINER, mesh=SIDECAR)
    for identifier, name in ((CONTAINER, "pytorch"), (SIDECAR, "mesh"), ("ee" * 32, ""), ("", "")):
        assert find_pod_names(kubelet.folder, UID, identifier) == PodNames("ml", "train-0", name)


def test_a_link_that_leads_to_a_log_that_was_moved_away_still_names_its_container(kubelet: Kubelet) -> None:
    kubelet.start("ml", "train-0", UID, pytorch=CONTAINER, mesh=SIDECAR)
    (kubelet.folder / f"ml_train-0_{UID}" / "pytorch" / "0.log").unlink()
    assert find_pod_names(kubelet.folder, UID, CONTAINER) == PodNames("ml", "train-0", "pytorch")


def test_names_so_long_that_links_are_cut_are_told_apart_or_unknown(kubelet: Kubelet) -> None:
    """The kubelet cuts a link's name to 255 characters; of the second pair nothing of the identifiers is left."""
    long = "trainer-" + "x" * 150
    kubelet.start("ml", long, UID, pytorch=CONTAINER, mesh=SIDECAR)
    assert find_pod_names(kubelet.folder, UID, CONTAINER) == PodNames("ml", long, "pytorch")
    other = "99999999-1111-2222-3333-444455556666"
    longest, alike = "t" * 210, "c" * 40
    kubelet.start("ml", longest, other, **{f"{alike}-a": CONTAINER, f"{alike}-b": ""})
    assert find_pod_names(kubelet.folder, other, CONTAINER) == PodNames("ml", longest, "")


def test_a_static_pod_is_found_by_its_identifier_without_dashes(kubelet: Kubelet) -> None:
    kubelet.start("kube-system", "etcd-gpu-a", "0f" * 16, etcd=CONTAINER)
    assert find_pod_names(kubelet.folder, "0f" * 16, CONTAINER) == PodNames("kube-system", "etcd-gpu-a", "etcd")


@pytest.mark.parametrize(
    "name", [f"ml_{UID}", f"a_b_c_{UID}", f"ML_train_{UID}", f"_train_{UID}", f"ml_\x1b[31m_{UID}"]
)
def test_a_folder_that_no_kubelet_makes_names_nothing(kubelet: Kubelet, name: str) -> None:
    (kubelet.folder / name).mkdir()
    assert find_pod_names(kubelet.folder, UID, CONTAINER) is None


def test_without_the_kubelets_folders_nothing_is_known(tmp_path: Path) -> None:
    assert find_pod_names(tmp_path / "pods", UID, CONTAINER) is None
    (tmp_path / "pods").touch()
    assert find_pod_names(tmp_path / "pods", UID, CONTAINER) is None


def test_a_process_is_described_with_the_names_of_its_pod(kubelet: Kubelet, tmp_path: Path) -> None:
    """A process's folder of procfs as it is in a pod of its host's network: the usual one for RDMA."""
    kubelet.start("ml", "pretrain-worker-3", UID, pytorch=CONTAINER, mesh=SIDECAR)
    process = tmp_path / "proc" / "4711"
    process.mkdir(parents=True)
    slice_of = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"
    (process / "cgroup").write_text(
        f"0::/kubepods.slice/kubepods-burstable.slice/{slice_of}/cri-containerd-{CONTAINER}.scope\n"
    )
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "gpu-a", "POD_NAME": "claims-another"}
    variables |= {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "pretrain-master-0", "TORCHELASTIC_RUN_ID": "none"}
    (process / "environ").write_bytes(b"\0".join(f"{name}={value}".encode() for name, value in variables.items()))
    own = Path("/proc/self/stat").read_text().rpartition(")")[2]
    (process / "stat").write_text(f"4711 (python3){own}")
    identity = identity_of(tmp_path / "proc", 4711)
    assert identity is not None
    question = Describe(str(tmp_path / "proc"), identity, "gpu-a", topology=False, pod_logs=str(kubelet.folder))
    assert dict(question.find(Memory(), ()).answer.job.labels()) == {
        "job": "pretrain",
        "scheduler": "kubernetes",
        "pod": "pretrain-worker-3",
        "namespace": "ml",
        "container": "pytorch",
        "container_id": CONTAINER,
        "owner_kind": "PyTorchJob",
        "owner_name": "pretrain",
        "world_rank": "3",
        "world_size": "8",
        "pod_uid": UID,
    }
    assert any(kubelet.links.iterdir()), "the links were not touched"
