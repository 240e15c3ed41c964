"""What this machine is: what the doctor says of it, what the kernel takes, and what a probe costs here."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from railscope.probes.calibration import CalibrationError, measure_trap_ns
from railscope.probes.links import AttachKind
from tests.gpu.lane import Lane, agent_command
from tests.gpu.rails import two_hosts
from tests.gpu.table import Verdict


def run(lane: Lane) -> None:
    done = subprocess.run([*agent_command(), "doctor", "--json"], capture_output=True, text=True, timeout=20)
    (lane.folder / "doctor.json").write_text(done.stdout)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"doctor could not run: {done.stderr.strip()}")
    doctor: dict[str, Any] = json.loads(done.stdout)
    lane.rows.add("kernel", doctor["kernel"])
    for finding in doctor["findings"]:
        if finding["status"] == "problem":
            lane.rows.add(f"doctor: {finding['check']}", finding["what"], verdict=Verdict.DIFFERS)
        elif finding["check"] in ("probes", "kernel", "NVLink", "devices"):
            lane.rows.add(f"doctor: {finding['check']}: {finding['status']}", finding["what"])
    for kind in AttachKind:
        try:
            lane.rows.figure(f"trap of a probe ({kind.name.lower()}), ns", measure_trap_ns(kind))
        except CalibrationError as error:
            lane.rows.add(f"trap of a probe ({kind.name.lower()}), ns", str(error), verdict=Verdict.ABSENT)
    with two_hosts() as two:
        lane.rows.add("rails of the two ranks", two.made_of, verdict=Verdict.SEEN if two.veth else Verdict.ABSENT)
