"""`python -m tests.bench`: railscope's cost against its floor and its peers, as a table and JSON.

Needs root, two cores that are not busy otherwise, and the packages of `make packages-bench`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from testbed.hosts import TestbedError
from tests.bench import (
    agent_cost,
    collection_cost,
    dataset_cost,
    exposition_cost,
    first_sight,
    late_attach,
    live_recording_cost,
    nccl_cost,
    probe_cost,
    program_cost,
    recorder_cost,
    report_cost,
    ring_reader,
    sampler_cost,
    tracker_cost,
    workload_cost,
)
from tests.bench.results import Line, table, write_json
from tests.bench.target import BenchError, Built, build

Part = Callable[[Built, int], list[Line]]

_PARTS: Final[dict[str, tuple[Part, int]]] = {
    probe_cost.PART: (probe_cost.measure, 201),
    ring_reader.PART: (ring_reader.measure, 7),
    agent_cost.PART: (agent_cost.measure, 3),
    sampler_cost.PART: (sampler_cost.measure, 3),
    collection_cost.PART: (collection_cost.measure, 25),
    workload_cost.PART: (workload_cost.measure, 10),
    nccl_cost.PART: (nccl_cost.measure, 6),
    program_cost.PART: (program_cost.measure, 3),
    exposition_cost.PART: (exposition_cost.measure, 9),
    late_attach.PART: (late_attach.measure, 5),
    first_sight.PART: (first_sight.measure, 7),
    recorder_cost.PART: (recorder_cost.measure, 5),
    tracker_cost.PART: (tracker_cost.measure, 3),
    dataset_cost.PART: (dataset_cost.measure, 3),
    live_recording_cost.PART: (live_recording_cost.measure, 2),
    report_cost.PART: (report_cost.measure, 1),
}
"""Each part and its usual number of rounds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", metavar="NAME", choices=sorted(_PARTS), help=f"one of {', '.join(_PARTS)}")
    parser.add_argument("--rounds", metavar="N", type=int, help="rounds of each part (each has its own default)")
    parser.add_argument("--json", metavar="PATH", type=Path, default=Path("bench-results.json"))
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error("at least one round is needed")
    if os.geteuid() != 0:
        print("the bench loads BPF programs: run it as root", file=sys.stderr)
        return 1
    lines: list[Line] = []
    try:
        with tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory:
            built = build(Path(directory))
            for name, (measure, rounds) in _PARTS.items():
                if options.only in (None, name):
                    print(f"{name} …", file=sys.stderr, flush=True)
                    lines += measure(built, options.rounds or rounds)
    except (BenchError, TestbedError) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(lines))
    write_json(options.json, lines)
    return 0


sys.exit(main())
