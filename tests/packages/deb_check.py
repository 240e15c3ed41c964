"""What tests/packages/test_deb.py runs inside its container, on nothing but the system's Python.

    python3 deb_check.py OLD.deb NEW.deb

Installs one package, looks, upgrades to the other while a job runs, removes and purges it.  What it saw goes to
/seen.json; where that lacks `finished`, it did not come to its end.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

SEEN: Final = Path("/seen.json")
LIBRARY: Final = "/job/libnccl.so.2"
PACKAGED_LIBRARY: Final = "/usr/lib/railscope/railscope/testbed/bin/librailscope-workload.so"
WORKLOAD: Final = Path(PACKAGED_LIBRARY).with_name("railscope-workload")
SLURM: Final = Path("/usr/share/railscope/slurm")
SLURM_JOB: Final = "4711"
ELEMENTS: Final = 1024
PAUSE_SECONDS: Final = 0.005
NOBODY: Final = 65534
MOST_SECONDS: Final = 30
UNDER: Final = ("/etc", "/lib", "/run", "/usr", "/var", "/opt", "/home", "/root", "/tmp")
OF_DPKG: Final = ("/var/log", "/var/lib/dpkg", "/var/cache")


def main(old: str, new: str) -> None:
    seen: dict[str, Any] = {}
    try:
        before = paths()
        seen["install"] = run("dpkg", "--install", old)
        seen["installed"] = look()
        job = start_job()
        try:
            seen["observed"] = calls_reach(20)
            seen["before_upgrade"] = totals()
            seen["upgrade"] = run("dpkg", "--install", new)
            seen["after_upgrade"] = totals()
            seen["upgraded"] = look()
            settled = calls_reach(seen["after_upgrade"]["calls"] + 50)
            seen["counted_after_upgrade"] = settled - seen["after_upgrade"]["calls"]
            with Path("/etc/railscope/railscope.yml").open("a") as file:
                file.write("\n# an administrator's line\n")
            seen["uprobes_while_it_runs"] = probes_of(job.pid)
            seen["slurm"] = slurm()
            if Path("/usr/bin/ansible-playbook").exists():
                seen["ansible"] = [ansible(), ansible()]
                seen["after_ansible"] = look()
            seen["remove"] = run("dpkg", "--remove", "railscope")
            seen["after_remove"] = {
                "active": run("systemctl", "is-active", "railscope")["output"].strip(),
                "configuration": Path("/etc/railscope/railscope.yml").exists(),
                "job": job.poll(),
                "programs": [str(path) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_agent(path)],
                "pins": [str(path) for path in Path("/sys/fs/bpf").glob("*railscope*")],
            }
        finally:
            job.kill()
            job.wait()
        seen["purge"] = run("dpkg", "--purge", "railscope")
        seen["left"] = sorted(paths() - before)
        seen["finished"] = True
    finally:
        seen["journal"] = run("journalctl", "--unit=railscope", "--output=cat", "--no-pager")["output"]
        SEEN.write_text(json.dumps(seen))


def look() -> dict[str, Any]:
    """How the service and the command are, right after dpkg has returned."""
    files = run("dpkg", "--listfiles", "railscope")["output"].split()
    show = run("systemctl", "show", "railscope", "--property=ActiveState,SubState,DropInPaths,MainPID,UnitFileState")
    return {
        **dict(line.split("=", 1) for line in show["output"].splitlines()),
        "version": run("railscope", "--version")["output"].strip(),
        "build_info": next((line for line in metrics().splitlines() if "build_info{" in line), ""),
        "check": run("railscope", "config", "check"),
        "man": run("sh", "-c", "man --warnings railscope-agent | cat"),
        "doctor": run("railscope", "doctor", "--json"),
        "bytecode": len(list(Path("/usr/lib/railscope").rglob("*.pyc"))),
        "sources": len(list(Path("/usr/lib/railscope").rglob("*.py"))),
        "nvml": run("python3", "-I", "-c", "import sys; sys.path[:0] = ['/usr/lib/railscope']; import pynvml"),
        "missing": [path for path in files if not os.path.lexists(path)],
    }


def start_job() -> subprocess.Popen[bytes]:
    """Another user's process that calls the packaged library's ncclAllReduce without end.

    Its communicator is null, so every call is refused, and counted before that; 7 is float32.
    """
    Path(LIBRARY).parent.mkdir()
    Path(LIBRARY).write_bytes(Path(PACKAGED_LIBRARY).read_bytes())
    program = (
        "import ctypes, time\n"
        f"library = ctypes.CDLL({LIBRARY!r})\n"
        "while True:\n"
        f"    library.ncclAllReduce(None, None, ctypes.c_size_t({ELEMENTS}), 7, 0, None, None)\n"
        f"    time.sleep({PAUSE_SECONDS})\n"
    )
    return subprocess.Popen([sys.executable, "-c", program], user=NOBODY, group=NOBODY, extra_groups=[])


def slurm() -> dict[str, Any]:
    """What the prolog does to a service that is down, and what the epilog says of a job with a stopped rank."""
    for_job = {"SLURM_JOB_ID": SLURM_JOB}
    run("systemctl", "stop", "railscope")
    seen: dict[str, Any] = {"prolog": run(str(SLURM / "prolog"), **for_job)}
    seen["ready"] = bool(fetch("/readyz"))
    wait_until(lambda: bool(fetch("/readyz")))
    seen["ready_later"] = bool(fetch("/readyz"))
    arguments = "--pattern ddp --seconds 60 --pace-us 1000 --bytes 65536 --id-file /job/id"
    ranks = [
        subprocess.Popen(
            [WORKLOAD, *arguments.split()],
            env={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": "lo", **for_job},
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    try:
        wait_until(lambda: calls_of_job(SLURM_JOB) > 10)
        ranks[1].send_signal(signal.SIGSTOP)
        wait_until(lambda: bool(json.loads(fetch("/stalls") or "{}").get("stalls")))
        seen["stalls"] = fetch("/stalls")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for name, job in (("epilog", SLURM_JOB), ("epilog_of_another", "1")):
        seen[name] = run(str(SLURM / "epilog"), SLURM_JOB_ID=job)
    for name in ("prolog", "epilog"):
        seen[f"journal_of_{name}"] = run("journalctl", "--quiet", "--output=cat", "-t", f"railscope-{name}")["output"]
    return seen


def ansible() -> dict[str, Any]:
    """The role, on this machine itself: it installs the package that is there already, and writes a configuration."""
    settings = json.dumps({"railscope_hosts": "localhost", "railscope_config": {"stalls": {"after": "20s"}}})
    playbook = ("ansible-playbook", "--connection=local", "--inventory=localhost,", "--extra-vars", settings)
    return run(*playbook, "/deploy/ansible/railscope.yml", ANSIBLE_NOCOLOR="1", HOME="/root")


def probes_of(pid: int) -> bool:
    """Whether a probed function of the job begins with a breakpoint (int3): the kernel's, in a private copy."""
    library = ctypes.CDLL(PACKAGED_LIBRARY)
    address = ctypes.cast(library.ncclAllReduce, ctypes.c_void_p).value or 0
    own = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(PACKAGED_LIBRARY))
    theirs = next(line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.endswith(LIBRARY))
    offset = address - int(own.partition("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(int(theirs.partition("-")[0], 16) + offset)
        return memory.read(1) == b"\xcc"


def _is_agent(command_line: Path) -> bool:
    try:
        return b"railscope\0agent" in command_line.read_bytes()
    except OSError:  # it has ended meanwhile
        return False


def totals() -> dict[str, float]:
    text = metrics()
    return {"calls": _calls(text), "dark_seconds": _value(text, r"railscope_agent_dark_seconds")}


def calls_reach(least: float) -> float:
    wait_until(lambda: _calls(metrics()) >= least)
    return _calls(metrics())


def calls_of_job(job: str) -> float:
    """What the second rank of a job's communicator has enqueued."""
    text = metrics()
    found = re.search(rf'^railscope_comm_info{{comm="(\w+)",rank="1"[^}}]*exported_job="{job}"', text, re.MULTILINE)
    return _value(text, rf'railscope_comm_enqueued_total{{comm="{found[1]}",rank="1"[^}}]*}}') if found else 0


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when something holds, or after a while in which it should: the tests look at what there is then."""
    deadline = time.monotonic() + MOST_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _calls(text: str) -> float:
    return _value(text, r'railscope_collective_calls_total\{op="AllReduce",dtype="float32".*?\}')


def _value(text: str, series: str) -> float:
    found = re.search(rf"^{series} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def metrics() -> str:
    return fetch("/metrics")


def fetch(path: str) -> str:
    """A page of the agent; empty where it does not answer, or with an error."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:9779{path}", timeout=10) as answer:
            body: bytes = answer.read()
    except OSError:
        return ""
    return body.decode()


def paths() -> set[str]:
    """Every path on the root, but for what dpkg and the journal write about themselves."""
    found = set()
    for top in UNDER:
        for folder, folders, names in os.walk(top):
            if folder.startswith(OF_DPKG):
                folders.clear()
                continue
            found |= {path for name in (*folders, *names) if "railscope" in (path := f"{folder}/{name}")}
    return found


def run(*command: str, **variables: str) -> dict[str, Any]:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "TERM": "dumb", "MANWIDTH": "80", **variables}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    return {"status": done.returncode, "output": done.stdout}


if __name__ == "__main__":
    main(*sys.argv[1:])
