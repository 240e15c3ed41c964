"""`python -m tests.bench`: railscope's cost against its floor and its peers, as a table and JSON.

Needs root, two cores that are not busy otherwise, and the packages of `make packages-bench`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from railscope.testbed.hosts import TestbedError
from tests.bench import (
    agent_cost,
    collection_cost,
    connection_cost,
    crowd_cost,
    dataset_cost,
    exposition_cost,
    fabric_cost,
    first_sight,
    import_cost,
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
    transfer_cost,
    workload_cost,
)
from tests.bench.foreign_probes import require_no_probes
from tests.bench.parts import Part, measure_parts
from tests.bench.results import table, write_json
from tests.bench.target import BenchError, build

_PARTS: Final[dict[str, Part]] = {
    probe_cost.PART: Part(probe_cost.measure, 201),
    ring_reader.PART: Part(ring_reader.measure, 7),
    agent_cost.PART: Part(agent_cost.measure, 3),
    sampler_cost.PART: Part(sampler_cost.measure, 3),
    collection_cost.PART: Part(collection_cost.measure, 25),
    connection_cost.PART: Part(connection_cost.measure, 51),
    fabric_cost.PART: Part(fabric_cost.measure, 25),
    workload_cost.PART: Part(workload_cost.measure, 10),
    **{case.part: Part(partial(nccl_cost.measure, case), 6) for case in nccl_cost.CASES},
    program_cost.PART: Part(program_cost.measure, 3),
    transfer_cost.PART: Part(transfer_cost.measure, 51),
    exposition_cost.PART: Part(exposition_cost.measure, 9),
    crowd_cost.PART: Part(crowd_cost.measure, 3),
    late_attach.PART: Part(late_attach.measure, 5),
    first_sight.PART: Part(first_sight.measure, 7),
    recorder_cost.PART: Part(recorder_cost.measure, 5),
    tracker_cost.PART: Part(tracker_cost.measure, 3),
    dataset_cost.PART: Part(dataset_cost.measure, 3),
    live_recording_cost.PART: Part(live_recording_cost.measure, 2),
    report_cost.PART: Part(report_cost.measure, 1),
    import_cost.PART: Part(import_cost.measure, 1),
}
"""Each part and its usual number of rounds."""


def wanted_parts(only: Sequence[str] | None) -> dict[str, Part]:
    """The parts of these names in the usual order; None: all."""
    return {name: part for name, part in _PARTS.items() if only is None or name in only}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for; `words` None: this process's."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        choices=sorted(_PARTS),
        help=f"one of {', '.join(_PARTS)}; may be given several times",
    )
    parser.add_argument("--rounds", metavar="N", type=int, help="rounds of each part (each has its own default)")
    parser.add_argument("--json", metavar="PATH", type=Path, default=Path("bench-results.json"))
    options = parser.parse_args(words)
    if options.rounds is not None and options.rounds < 1:
        parser.error("at least one round is needed")
    return options


def main() -> int:
    options = arguments()
    if os.geteuid() != 0:
        print("the bench loads BPF programs: run it as root", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory:
        try:
            require_no_probes()
            built = build(Path(directory))
        except (BenchError, TestbedError) as error:
            print(error, file=sys.stderr)
            return 1
        # All parts take an hour: what is measured is not lost with what comes after it.
        keep = partial(write_json, options.json)
        measured = measure_parts(wanted_parts(options.only), built, options.rounds, keep)
    print(table(measured.lines))
    return measured.status(sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
