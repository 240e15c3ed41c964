"""A month of step times through the rule that finds longer ones: simulated drifts, noise, phases and restarts."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from railscope.dashboards import recorded, rules_files
from tests.stack.prometheus import tool

pytestmark = pytest.mark.stack

MINUTES = 4
"""Between two samples and two evaluations: a rule that remembers needs less than five."""
DAY = 24 * 60 // MINUTES
MONTH = 30 * DAY
ALERT = "RailscopeStepsLonger"
_NEEDED = {str(recorded.STEP_SECONDS_HELD), str(recorded.STEPS_LONGER_SINCE), ALERT}


def rules() -> dict[str, object]:
    """Those that tell of longer steps, alone: all others would take a minute for a month."""
    kept = [
        {name: value for name, value in rule.items() if name != "annotations"}
        for file in (rules_files.RECORDING, rules_files.ALERTS)
        for group in yaml.safe_load((rules_files.SHIPPED / file).read_text())["groups"]
        for rule in group["rules"]
        if rule.get("record", rule.get("alert")) in _NEEDED
    ]
    assert len(kept) == len(_NEEDED)
    return {"groups": [{"name": "steps", "rules": kept}]}


def noisy(chance: random.Random, usual: float) -> float:
    """A mean of five minutes: a few percent beside the usual, now and then a busy file system."""
    busy = 1.5 if chance.random() < 0.01 else 1.0
    return usual * chance.gauss(1.0, 0.04) * busy


def sound(number: int) -> Iterator[float | None]:
    """A job of a month: evaluations without steps, pauses, days that are 10 % slower, and a neighbour at night."""
    chance = random.Random(number)
    for at in range(MONTH):
        if at % 36 == 35 or chance.random() < 0.005:
            yield None
            continue
        day = 1.1 if (at // DAY) % 7 in (2, 3) else 1.0
        night = 1.05 if at % DAY < DAY // 4 else 1.0
        yield noisy(chance, 2.0 * day * night)


def drifting(number: int) -> Iterator[float | None]:
    """The same job, that becomes 1.5 times as slow in a day, on the tenth."""
    for at, value in enumerate(sound(number)):
        slower = min(1.0, max(0.0, (at - 10 * DAY) / DAY))
        yield None if value is None else value * (1 + 0.5 * slower)


def stepped(number: int) -> Iterator[float | None]:
    """The same, 1.3 times as slow at once, on the twentieth."""
    for at, value in enumerate(sound(number)):
        yield None if value is None else value * (1.3 if at >= 20 * DAY else 1.0)


JOBS = {**{f"sound-{number}": sound(number) for number in range(2)}, "drift": drifting(8), "step": stepped(9)}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("steps")
    (folder / "rules.yml").write_text(yaml.safe_dump(rules()))
    series = []
    for name, values in JOBS.items():
        of = f'{{cluster="x",comm="{name}"}}'
        written = " ".join("_" if value is None else f"{value:.4f}" for value in values)
        series += [
            {"series": f"{recorded.STEP_SECONDS}{of}", "values": written},
            {"series": f"railscope_comm_info{of}", "values": f"1x{MONTH}"},
        ]
    firing = f'ALERTS{{alertname="{ALERT}",alertstate="firing",comm="%s"}}'
    checks = [
        *(_none(f"count_over_time({firing % name}[30d]) > 0", MONTH - 1) for name in JOBS if "sound" in name),
        *(_none(f"count_over_time({firing % name}[30d]) > 0", before) for name, before in BEFORE.items()),
        *(_one(f"count(count_over_time({firing % name}[6h]))", after) for name, after in AFTER.items()),
        _one(f"count(abs({recorded.STEPS_LONGER_SINCE.where(OF_STEP)} - {20 * DAY * MINUTES * 60}) < 1800)", SOON),
    ]
    test = {"interval": f"{MINUTES}m", "input_series": series, "promql_expr_test": checks}
    whole = {"rule_files": ["rules.yml"], "evaluation_interval": f"{MINUTES}m", "tests": [test]}
    (folder / "test.yml").write_text(yaml.safe_dump(whole))
    command = [tool("promtool"), "test", "rules", str(folder / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 1)
    return "" if done.returncode == 0 else done.stdout + done.stderr


BEFORE = {"drift": 10 * DAY - 1, "step": 20 * DAY - 1}
AFTER = {"drift": 12 * DAY, "step": 20 * DAY + DAY // 24}
"""An hour after the step is the alert there."""
SOON = 20 * DAY + DAY // 24
OF_STEP = 'comm="step"'


def _none(expression: str, at: int) -> dict[str, object]:
    return {"expr": expression, "eval_time": f"{at * MINUTES}m"}


def _one(expression: str, at: int) -> dict[str, object]:
    return {**_none(expression, at), "exp_samples": [{"labels": "{}", "value": 1}]}


def test_a_month_of_sound_jobs_has_no_alarm_and_drifts_have_one(failures: str) -> None:
    assert failures == ""
