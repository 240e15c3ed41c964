"""Every alert fires, stays for two days of its fault, and ends with it: promtool's clock is simulated."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from railscope.dashboards import rules_files
from tests.stack.lifetimes import LIVES, RULES_MINUTES, SCRAPES_PER_MINUTE, Life
from tests.stack.prometheus import tool

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What promtool finds wrong with all lives."""
    tests = [one.test() for one in LIVES]
    whole = {
        "rule_files": [str(rules_files.SHIPPED / name) for name in (rules_files.RECORDING, rules_files.ALERTS)],
        "evaluation_interval": f"{RULES_MINUTES}m",
        "tests": [
            {
                "interval": f"{60 // SCRAPES_PER_MINUTE}s",
                **{kind: [one for test in tests for one in test[kind]] for kind in tests[0]},
            }
        ],
    }
    file = tmp_path_factory.mktemp("lifetimes") / "lifetimes.yml"
    file.write_text(yaml.safe_dump(whole))
    command = [tool("promtool"), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    found = re.split(r"\n(?=\s*expr:)", done.stderr)[1:]
    assert (done.returncode == 0) == (not found), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_an_alert_lasts_as_long_as_its_fault(failures: list[str], life: Life) -> None:
    assert [one for one in failures if f'cluster=\\"{life.name}\\"' in one] == []


def test_every_alert_is_tested_so() -> None:
    names = [alert for life in LIVES for alert in life.fires]
    assert set(names) == {alert.name for alert in rules_files.make_alerts()}
    assert len({life.name for life in LIVES}) == len(LIVES)


def test_what_is_wrong_is_said_of_a_life_that_there_is(failures: list[str]) -> None:
    assert [one for one in failures if not any(f'cluster=\\"{life.name}\\"' in one for life in LIVES)] == []
