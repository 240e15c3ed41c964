"""The image: built without an engine or a registry, run with the rights of the shipped DaemonSet beside a job.

The job is another user's process of this machine that calls the workload library's ncclAllReduce; the agent in the
container looks at that process alone, because other tests' jobs run on the same kernel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.fabric.agent_process import free_port
from tests.nccl.library import REPOSITORY
from tests.packages import oci
from tests.packages.conftest import ARCHITECTURE, Packages
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

BUILD: Final = REPOSITORY / "deploy/image/build"
NOBODY: Final = 65534
CALLS: Final = """\
import ctypes, time
library = ctypes.CDLL({library!r})
while True:
    library.ncclAllReduce(None, None, ctypes.c_size_t(1024), 7, 0, None, None)
    time.sleep(0.005)
"""
NUMBERS: Final = {"DAC_READ_SEARCH": 2, "SYS_PTRACE": 19, "PERFMON": 38, "BPF": 39}
"""Source: include/uapi/linux/capability.h."""


def build_image(debs: Path, output: Path) -> Path:
    """The archive of this machine's image, of the package in a folder."""
    environment = {**os.environ, "RAILSCOPE_IMAGE_OUTPUT": str(output), "RAILSCOPE_DEBS": str(debs)}
    done = subprocess.run([BUILD, ARCHITECTURE], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def archive(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image of this checkout's package, alone in a folder with the package."""
    for program in ("buildah", "mmdebstrap", "runc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing: run 'make packages-image' as root")
    folder = tmp_path_factory.mktemp("image")
    shutil.copy(packages.old, folder)
    return build_image(folder, folder)


@pytest.fixture(scope="module")
def image(archive: Path) -> oci.Image:
    """The same, unpacked."""
    return oci.unpack(archive, archive.parent / "root")


def test_two_builds_are_equal_byte_by_byte(archive: Path, tmp_path: Path) -> None:
    assert build_image(archive.parent, tmp_path).read_bytes() == archive.read_bytes()


@dataclass(frozen=True, slots=True)
class Pod:
    container: oci.Container
    url: str
    job: subprocess.Popen[bytes]
    state: Path

    def get(self, path: str) -> str:
        """A page of the agent; empty where there is none."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def calls(self) -> float:
        series = r'^railscope_collective_calls_total\{op="AllReduce",dtype="float32".*?\} (\S+)$'
        found = re.search(series, self.get("/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0

    def ended(self) -> bool:
        return self.container.process.poll() is not None


@pytest.fixture(scope="module")
def pod(image: oci.Image) -> Iterator[Pod]:
    # The job's user must be able to enter it.
    with tempfile.TemporaryDirectory(prefix="railscope-pod-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copy(REPOSITORY / "testbed/bin/librailscope-workload.so", folder / "libnccl.so.2")
        binds = {folder / name: place for name, place in (("state", "/run/railscope"), ("kept", "/var/lib/railscope"))}
        for bind in binds:
            bind.mkdir()
        program = CALLS.format(library=str(folder / "libnccl.so.2"))
        job = subprocess.Popen(["/usr/bin/python3", "-I", "-c", program], user=NOBODY, group=NOBODY, extra_groups=[])
        try:
            port = free_port()
            arguments = f"agent --web.listen-address=127.0.0.1:{port} --pid={job.pid} --state.directory=/run/railscope"
            bundle = oci.lay_bundle(image, folder / "bundle", arguments.split(), binds)
            with oci.running(bundle) as container:
                made = Pod(container, f"http://127.0.0.1:{port}", job, folder / "state")
                eventually(lambda: bool(made.get("/readyz")) or made.ended())
                assert not made.ended(), container.log
                yield made
        finally:
            job.kill()
            job.wait()


def test_it_holds_the_agent_and_no_shell_package_manager_or_compiler(image: oci.Image) -> None:
    names = {path.name for folder in ("usr/bin", "usr/sbin", "bin", "sbin") for path in (image.root / folder).glob("*")}
    assert {"railscope", "python3"} <= names
    assert not names & set("sh bash dash busybox apt apt-get dpkg gcc cc clang ld pip pip3 perl".split())
    assert not [path for path in image.root.rglob("*") if path.name in ("pip", "setuptools", "ensurepip")]
    status = image.root / "var/lib/dpkg/status.d"
    assert {"railscope", "libc6", "libbpf1", "python3-numpy"} <= {path.name for path in status.iterdir()}
    assert (image.root / "usr/share/doc/libc6/copyright").exists()


def test_it_says_its_version_and_commit(image: oci.Image) -> None:
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.revision"] == (REPOSITORY / "probes/revision.txt").read_text().strip()
    assert image.architecture == ARCHITECTURE


def test_everything_is_compiled_since_nothing_can_be_written_there(image: oci.Image) -> None:
    own = image.root / "usr/lib/railscope"
    assert len(list(own.rglob("*.pyc"))) == len(list(own.rglob("*.py"))) > 300


def test_another_users_job_is_counted_with_the_rights_of_the_daemonset(pod: Pod) -> None:
    eventually(lambda: pod.calls() >= 20 or pod.ended())
    assert not pod.ended(), pod.container.log
    status = Path(f"/proc/{pod.container.pid}/status").read_text()
    wanted = {NUMBERS[name] for name in oci.agent_of_manifest()["securityContext"]["capabilities"]["add"]}
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        bits = int(re.search(rf"{kind}:\s+(\S+)", status)[1], 16)  # type: ignore[index]
        assert {bit for bit in range(64) if bits >> bit & 1} == wanted
    assert re.search(r"NoNewPrivs:\s+1", status)
    assert not oci.SECCOMP.exists() or re.search(r"Seccomp:\s+2", status)


def test_the_doctor_runs_inside_and_finds_the_probes_well(pod: Pod) -> None:
    done = pod.container.execute("railscope", "doctor", "--json")
    assert done.stdout, done.stderr
    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    for check in ("libbpf", "BPF objects", "probes"):
        assert findings[check]["status"] == "ok", findings[check]


def test_at_its_end_probes_are_off_and_totals_are_kept_for_the_next_one(pod: Pod) -> None:
    os.kill(pod.container.pid, signal.SIGTERM)
    assert pod.container.process.wait(timeout=30) == 0, pod.container.log
    assert pod.job.poll() is None
    assert (pod.state / "totals").stat().st_size > 0
