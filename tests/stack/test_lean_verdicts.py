"""What profile `lean` leaves out changes no verdict: the same faults, told by all series and by few, in Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from railscope.exporters.series.lean import FULL, LEAN
from tests.fleet.past import began, past
from tests.fleet.simulation import Fault, Fleet

pytestmark = pytest.mark.stack

NODES = 8


def told(folder: Path, profile: str, fault: Fault) -> tuple[str, list[dict[str, Any]]]:
    with past(folder / profile, Fleet(NODES, began(), profile), fault) as server:
        verdict = server.diagnose()
    assert verdict["answered"]
    named = ("cause", "comm", "nranks", "op", "strength", "ranks", "pids", "headline")
    # Of an RDMA port and its network device the port alone is known to have carried something.
    findings = [
        {name: one[name] for name in named} | {name: set(one[name]) for name in ("hosts", "rails")}
        for one in json.loads(json.dumps(verdict["findings"]).replace("ens3np0", "mlx5_3"))
    ]
    return verdict["headline"].replace("ens3np0", "mlx5_3"), findings


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.BEHIND, Fault.LEAF, Fault.THREE])
def test_the_verdict_is_the_same(fault: Fault, tmp_path: Path) -> None:
    full, lean = told(tmp_path, FULL, fault), told(tmp_path, LEAN, fault)
    assert lean == full
    assert bool(lean[1]) is (fault is not Fault.NONE)
