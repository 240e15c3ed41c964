"""`python -m tests.fleet`: what fleets cost a Prometheus, and what is said of their faults, as a table and JSON.

Simulated nodes of several numbers are scraped by a real Prometheus with the shipped rules, whose alerts go through a
real Alertmanager with the shipped routes; each fault is left there until pages are out, and `railscope diagnose` is
asked.  Needs Debian's prometheus and prometheus-alertmanager, two cores that are not busy otherwise, and at 512 nodes
8 GB of memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from railscope.exporters.series.lean import FULL, PROFILES
from tests.fleet.measure import Measured, measure, table, write_json
from tests.fleet.simulation import Fault


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128, 512], metavar="N")
    parser.add_argument("--faults", nargs="+", choices=[str(one) for one in Fault], default=[str(one) for one in Fault])
    parser.add_argument("--profile", choices=PROFILES, default=FULL, help="of what the agents show")
    parser.add_argument("--json", type=Path, default=Path("fleet-results.json"), metavar="PATH")
    options = parser.parse_args()
    measured: list[Measured] = []
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="railscope-fleet-") as folder:
            for one in measure(nodes, [Fault(name) for name in options.faults], Path(folder), options.profile):
                measured.append(one)
                write_json(options.json, measured)
                print(table(measured).splitlines()[-1], flush=True)
    print(f"\n{table(measured)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
