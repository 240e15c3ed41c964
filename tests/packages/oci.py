"""Runs an OCI archive as a pod of a manifest would run it, with runc and without an engine, a registry or a cluster.

The container has what the DaemonSet of deploy/kustomize asks for, and nothing more: its capabilities and no new
privileges, a root that cannot be written to, the host's processes and network, and the seccomp profile that this
machine's container packages bring, which is `RuntimeDefault` but for two rules of containerd's (seccomp_default.go):
bpf and perf_event_open follow CAP_BPF and CAP_PERFMON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.nccl.library import REPOSITORY

MANIFEST: Final = REPOSITORY / "deploy/kustomize/railscope.yaml"
SECCOMP: Final = Path("/usr/share/containers/seccomp.json")
OF_CONTAINERD: Final = {"CAP_BPF": "bpf", "CAP_PERFMON": "perf_event_open"}
MASKED: Final = (
    *("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"),
)
READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


@dataclass(frozen=True, slots=True)
class Image:
    """An OCI archive, unpacked."""

    root: Path
    config: Mapping[str, Any]
    """What the image says of itself: Env, Entrypoint, Labels."""
    architecture: str


def unpack(archive: Path, folder: Path) -> Image:
    """Lay the layers of an archive of one image, the lowest first."""
    with tarfile.open(archive) as packed:

        def blob(digest: str) -> Any:
            return packed.extractfile(f"blobs/{digest.replace(':', '/')}")

        index = json.load(packed.extractfile("index.json"))  # type: ignore[arg-type]
        manifest = json.load(blob(index["manifests"][0]["digest"]))
        image = json.load(blob(manifest["config"]["digest"]))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"])) as files:
                files.extractall(folder, filter="fully_trusted")
    return Image(folder, image["config"], image["architecture"])


def agent_of_manifest() -> dict[str, Any]:
    """The container of the shipped DaemonSet."""
    (daemon_set,) = (one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "DaemonSet")
    assert daemon_set["spec"]["template"]["spec"]["hostPID"]
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    return dict(container)


def lay_bundle(image: Image, folder: Path, arguments: Sequence[str], binds: Mapping[Path, str]) -> Path:
    """Write the configuration of a container for runc.

    Args:
        image: what it runs.
        folder: where the bundle is made.
        arguments: after the image's entry point.
        binds: folders of this machine, and where the container has them, writable.
    """
    context = agent_of_manifest()["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    capabilities = [f"CAP_{name}" for name in context["capabilities"]["add"]]
    folder.mkdir()
    bundle = {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": context["runAsUser"], "gid": 0},
            "args": [*image.config["Entrypoint"], *arguments],
            "env": image.config["Env"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": not context["allowPrivilegeEscalation"],
        },
        "root": {"path": str(image.root), "readonly": context["readOnlyRootFilesystem"]},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]},
            {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro", "nosuid"]},
            *(
                {"destination": place, "type": "none", "source": str(source), "options": ["bind"]}
                for source, place in binds.items()
            ),
        ],
        "linux": {
            "cgroupsPath": f"/railscope-test-{os.getpid()}",
            "namespaces": [{"type": "mount"}, {"type": "ipc"}, {"type": "uts"}],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            **({"seccomp": runtime_default(capabilities)} if SECCOMP.exists() else {}),
        },
    }
    (folder / "config.json").write_text(json.dumps(bundle))
    return folder


def runtime_default(capabilities: Sequence[str]) -> dict[str, Any]:
    """The profile of container runtimes for a container with these capabilities."""
    profile = json.loads(SECCOMP.read_text())
    machine, architecture = {
        "x86_64": ("SCMP_ARCH_X86_64", "amd64"),
        "aarch64": ("SCMP_ARCH_AARCH64", "arm64"),
    }[os.uname().machine]
    named = [OF_CONTAINERD[one] for one in capabilities if one in OF_CONTAINERD]
    allowed: list[dict[str, Any]] = [{"names": named, "action": "SCMP_ACT_ALLOW"}]
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
        if architecture not in includes.get("arches", [architecture]) or architecture in excludes.get("arches", []):
            continue
        if not set(includes.get("caps") or ()) <= set(capabilities):
            continue
        if set(excludes.get("caps") or ()) & set(capabilities):
            continue
        names = [name for name in rule["names"] if name not in named]
        kept = {key: rule[key] for key in ("action", "args", "errnoRet") if rule.get(key)}
        if names:
            allowed.append({"names": names, **kept})
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": 1,
        "architectures": [machine],
        "syscalls": allowed,
    }


@dataclass(frozen=True, slots=True)
class Container:
    """A container that runs."""

    name: str
    bundle: Path
    process: subprocess.Popen[bytes]
    """runc's, which ends with the container's first process, and as that does."""

    @property
    def pid(self) -> int:
        """Of the container's first process, on this machine."""
        return int(json.loads(_runc(self.bundle, "state", self.name).stdout)["pid"])

    @property
    def log(self) -> str:
        return (self.bundle / "log").read_text()

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command inside, as `kubectl exec` runs it."""
        return _runc(self.bundle, "exec", self.name, *command)


@contextlib.contextmanager
def running(bundle: Path) -> Iterator[Container]:
    """A container that runs until it ends or the block does."""
    name = f"railscope-test-{os.getpid()}"
    with (bundle / "log").open("wb") as log:
        process = subprocess.Popen(
            ["runc", "--root", str(bundle / "state"), "run", "--bundle", str(bundle), name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield Container(name, bundle, process)
    finally:
        _runc(bundle, "delete", "--force", name)
        process.wait(timeout=30)


def _runc(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("runc", "--root", str(bundle / "state"), *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
