"""`python -m tests.fleet`: what fleets cost a Prometheus, and what is said of their faults, as tables and JSON.

Costs and verdicts come from a Prometheus that holds a simulated fleet's last minutes: processor time of each of the
shipped rules and of `railscope diagnose`.  Pages come from a Prometheus that scrapes such a fleet as time goes by, and
a real Alertmanager with the shipped routes; where scrapes are late because the machine is busy, that is told.  The
exit status is 1 where a figure is beyond its bound.

512 nodes take 10 GB of memory and, for costs, some three minutes of processor time a fault; pages take a quarter of an
hour a fleet.  Needs Debian's prometheus and prometheus-alertmanager.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Final

from railscope.exporters.series.lean import FULL, PROFILES
from tests.fleet.costs import Costs, measure_costs
from tests.fleet.pages import Paged, measure_pages
from tests.fleet.simulation import Fault
from tests.fleet.table import describe, rows, write_json

_FAULTS: Final = tuple(str(one) for one in Fault if one is not Fault.NONE)
_COSTS, _PAGES = "costs", "pages"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128, 512], metavar="N")
    parser.add_argument("--faults", nargs="+", choices=[str(one) for one in Fault], default=_FAULTS)
    parser.add_argument("--only", choices=(_COSTS, _PAGES), help="one of the two")
    parser.add_argument("--profile", choices=PROFILES, default=FULL, help="of what the agents show")
    parser.add_argument("--json", type=Path, default=Path("fleet-results.json"), metavar="PATH")
    options = parser.parse_args()
    faults = [Fault(name) for name in options.faults]
    costs: list[Costs] = []
    paged: list[Paged] = []
    for nodes in options.nodes:
        for fault in faults if options.only != _PAGES else ():
            costs.append(measure_costs(nodes, fault, options.profile))
            write_json(options.json, costs, paged)
            print(describe(costs[-1:], ()), flush=True)
        if options.only != _COSTS:
            paged += measure_pages(nodes, faults, options.profile)
            write_json(options.json, costs, paged)
            print(describe((), [one for one in paged if one.nodes == nodes]), flush=True)
    print(f"\n{describe(costs, paged)}")
    return 0 if all(row.met for row in rows(costs, paged)) else 1


if __name__ == "__main__":
    # Who ends it leaves no servers and no gigabytes behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
