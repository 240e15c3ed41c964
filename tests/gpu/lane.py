"""Run the checks one after the other, each in a process of its own with a time limit, and print one table last.

    tests/gpu/run [--only CHECK…]          # on the machine with the GPU
    tests/gpu/run --double [--short]       # here, without one (tests/gpu/rehearsal.py)

A check that fails, ends or hangs costs its own rows only.  `$OUT` gets results.json, table.txt and evidence.tar.xz with
each check's log of the agent, /metrics, recordings and output.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from railscope.testbed.hosts import remove_leftovers
from tests.fabric.agent_process import AgentProcess
from tests.gpu.rails import TwoHosts
from tests.gpu.ranks import Ranks
from tests.gpu.table import Results, Row, Rows, Verdict, as_text, changes, last_results, read_rows

ALL_SECONDS: Final = 230.0
"""Unless more is given: a quarter of an hour then has room for a run, a mend and another run."""
CHECKS: Final[Mapping[str, float]] = {
    "machine": 90.0,
    "counts": 80.0,
    "times": 60.0,
    "questions": 75.0,
    "stalls": 80.0,
    "graphs": 40.0,
    "nvml": 40.0,
    "cost": 120.0,
}
"""Modules of tests/gpu/checks, the most telling first, with the seconds that each may take where it hangs."""
ROWS: Final = "rows.jsonl"
PACKAGE: Final = "tests.gpu.checks"
_MOST_EVIDENCE_BYTES: Final = 15 << 20
_SET_CHILD_SUBREAPER: Final = 36  # prctl(2)
_TIDY_SECONDS: Final = 3.0
_EXPLAIN_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Lane:
    """What a check works with."""

    folder: Path
    """For what it leaves as evidence."""
    rows: Rows
    backend: str
    """Of its ranks: see tests/gpu/rank.py."""
    kit: Path
    """Where the kit was unpacked."""
    short: bool
    """As much as shows that everything works, and no more."""
    ends: float
    """When the check must have ended, by the monotonic clock, s."""

    @property
    def simulated(self) -> bool:
        return _is_simulated(self.backend)

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def agent(self, name: str, *arguments: str) -> AgentProcess:
        """The kit's agent; its log is evidence."""
        return AgentProcess(*arguments, command=agent_command(), log=self.folder / f"agent-{name}.log")

    def ranks(
        self, two: TwoHosts, name: str = "ranks", *, environment: Mapping[str, str] | None = None, port_offset: int = 0
    ) -> Ranks:
        return Ranks(two, self.folder / name, self.backend, environment=environment, port_offset=port_offset)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """One part of a check: what goes wrong in it is a row, and the parts behind it are tried all the same."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is: the machine is there for minutes
            self.rows.add(what, f"{type(error).__name__}: {error}", verdict=Verdict.FAILED)
            with (self.folder / "errors.txt").open("a") as file:
                traceback.print_exc(file=file)

    def keep_metrics(self, agent: AgentProcess, name: str = "metrics") -> None:
        """Leave what the agent exports as evidence."""
        (self.folder / f"{name}.txt").write_text(agent.text())


def _is_simulated(backend: str) -> bool:
    """Whether ranks of this backend run on a stand-in for the GPU."""
    return backend != "torch"


def agent_command() -> tuple[str, ...]:
    """`railscope` of whatever PYTHONPATH has: the kit's."""
    return (sys.executable, "-P", "-m", "railscope.agent.cli.main")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the lane is to do."""

    out: Path
    kit: Path
    backend: str
    short: bool
    revision: str
    package: str = PACKAGE
    """Where the checks are."""
    most_seconds: float = 120.0
    """No check may take longer, whatever `CHECKS` says."""
    all_seconds: float = ALL_SECONDS

    @property
    def simulated(self) -> bool:
        return _is_simulated(self.backend)


def run_lane(plan: Plan, wanted: Sequence[str]) -> Results:
    """Run the checks; writes `$OUT`, prints the table and returns what it holds."""
    began = time.monotonic()
    # What a check leaves behind becomes our child, and is ended.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    plan.out.mkdir(parents=True, exist_ok=True)
    # Not below what comes back: few files do.
    work = Path(tempfile.mkdtemp(prefix="railscope-gpu-"))
    evidence = work / "evidence"
    evidence.mkdir()
    held = _hold_gpu()
    results = Results(
        device="CUDA test double" if plan.simulated else _device(),
        simulated=plan.simulated,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revision=plan.revision,
        seconds=0.0,
        machine=_machine(simulated=plan.simulated),
        rows=(),
    )
    for check in wanted:
        left = plan.all_seconds - (time.monotonic() - began)
        rows = _run_check(plan, check, evidence / check, min(CHECKS[check], plan.most_seconds, left))
        seconds = round(time.monotonic() - began, 1)
        results = replace(results, rows=results.rows + tuple(rows), seconds=seconds)
        # Whoever runs the lane may be stopped before its end.
        (plan.out / "results.json").write_text(results.to_json())
        _pack(evidence, plan.out / "evidence.tar.xz")
    remove_leftovers()
    shutil.rmtree(work, ignore_errors=True)
    if held is not None:
        os.close(held)
    for line in changes(results.rows, None if plan.simulated else last_results(results.device)):
        print(line)
    table = as_text(results.rows)
    (plan.out / "table.txt").write_text(table)
    simulated = " (simulated)" if plan.simulated else ""
    print(f"\n{results.device}{simulated}, {results.seconds:.0f} s, {plan.revision}\n\n{table}")
    return results


def _run_check(plan: Plan, check: str, folder: Path, seconds: float) -> list[Row]:
    folder.mkdir()
    if seconds < 1:
        return [Row(check, "check", "not begun: the time was up", verdict=Verdict.FAILED)]
    print(f"{check}: at most {seconds:.0f} s", flush=True)
    command = [sys.executable, "-P", "-m", "tests.gpu.lane", "--check", check, "--folder", str(folder)]
    command += ["--kit", str(plan.kit), "--backend", plan.backend, "--package", plan.package]
    command += ["--seconds", str(seconds), *(["--short"] if plan.short else [])]
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            _ask_ranks_where_they_are()
    _end_children()
    took = time.monotonic() - began
    rows = read_rows(folder / ROWS)
    if status is None:
        rows.append(Row(check, "check", f"did not end within {seconds:.0f} s", verdict=Verdict.FAILED))
    elif status != 0:
        said = (folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
        rows.append(Row(check, "check", f"status {status}: {' '.join(said)}", verdict=Verdict.FAILED))
    rows.append(Row(check, "took, s", f"{took:.1f}"))
    return rows


def _hold_gpu() -> int | None:
    """Keep the driver from forgetting the GPU whenever nobody uses it; None: there is none."""
    try:
        return os.open("/dev/nvidia0", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def _ask_ranks_where_they_are() -> None:
    """Have ranks that hang write their threads' stacks to their output."""
    for child in psutil.Process().children(recursive=True):
        try:
            if "tests.gpu.rank" in child.cmdline():
                child.send_signal(signal.SIGUSR1)
        except psutil.Error:
            continue
    time.sleep(_EXPLAIN_SECONDS)


def _end_children() -> None:
    """End everything that a check started, first politely: an agent takes its probes off."""
    children = psutil.Process().children(recursive=True)
    for number in (signal.SIGCONT, signal.SIGTERM):
        for child in children:
            _signal(child, number)
    _, left = psutil.wait_procs(children, timeout=_TIDY_SECONDS)
    for child in left:
        _signal(child, signal.SIGKILL)
    psutil.wait_procs(left, timeout=_TIDY_SECONDS)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _pack(folder: Path, archive: Path) -> None:
    """Everything in the folder, the smallest files first, as long as it is little enough to be brought back."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size = 0
    with tarfile.open(archive, "w:xz", preset=1) as tar:
        for path in files:
            # As if nothing could be compressed.
            if size + path.stat().st_size > _MOST_EVIDENCE_BYTES:
                print(f"left out of {archive.name}: {path.relative_to(folder)}")
                continue
            size += path.stat().st_size
            tar.add(path, str(path.relative_to(folder.parent)))


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints.

    Raises:
        OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired: there is none, or it refuses.
    """
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout


def _device() -> str:
    try:
        return nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown GPU"


def _machine(*, simulated: bool) -> dict[str, str]:
    facts = {"kernel": platform.release(), "python": platform.python_version(), "cores": str(os.cpu_count())}
    if simulated:
        return facts
    try:
        query = nvidia_smi("--query-gpu=driver_version,vbios_version,memory.total", "--format=csv,noheader")
        facts["driver"] = query.splitlines()[0].split(",")[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        facts["driver"] = "unknown"
    for name in ("torch", "nvidia-nccl-cu13"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "unknown"
    return facts


def _check_alone(options: argparse.Namespace) -> None:
    """What runs in the process of one check."""
    rows = Rows(options.check, options.folder / ROWS)
    module = importlib.import_module(f"{options.package}.{options.check}")
    ends = time.monotonic() + options.seconds
    module.run(Lane(options.folder, rows, options.backend, options.kit, options.short, ends))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description="Check railscope beside a job on a real GPU.")
    names = ", ".join(CHECKS)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK", help=names)
    parser.add_argument("--short", action="store_true", help="as much as shows that everything works")
    parser.add_argument("--most", type=float, default=ALL_SECONDS, help="seconds for all of it (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="where results go (default: $OUT)")
    # What follows is for this program itself and its tests.
    for name, kind in (("kit", Path), ("folder", Path), ("check", str), ("revision", str), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="torch", help=argparse.SUPPRESS)
    parser.add_argument("--package", default=PACKAGE, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Exit status 0: every check came to its end and nothing differs; 1: else."""
    options = _options()
    if options.check:
        _check_alone(options)
        return 0
    most = {} if options.seconds is None else {"most_seconds": options.seconds}
    plan = Plan(
        options.out,
        options.kit,
        options.backend,
        options.short,
        options.revision or "unknown",
        options.package,
        all_seconds=options.most,
        **most,
    )
    return int(not run_lane(plan, options.only).passed)


if __name__ == "__main__":
    sys.exit(main())
