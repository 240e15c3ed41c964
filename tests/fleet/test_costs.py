"""The bench of fleets on a small one: every rule is asked, after the rules before it recorded what it rests on."""

from __future__ import annotations

import pytest

from railscope.dashboards import recorded
from railscope.exporters.series.lean import LEAN
from tests.fleet.costs import measure_costs
from tests.fleet.rule_cost import read_rules
from tests.fleet.simulation import Fault

pytestmark = pytest.mark.stack


def test_rules_find_what_others_recorded_and_the_verdict_is_right() -> None:
    found = measure_costs(8, Fault.BEHIND, LEAN)
    assert found.right, found.diagnosis
    assert [(one.group, one.name) for one in found.rules] == [(rule.group, rule.name) for rule in read_rules()]
    series = {one.name: one.series for one in found.rules}
    # The process that is behind has two communicators: the last of a chain of eight rules names it in both.
    assert series[recorded.OPERATIONS_BEHIND_ROOT.name] == 2
    assert series["RailscopeRankBehindCommunicator"] == 2
    assert found.rules_cpu_seconds > 0
