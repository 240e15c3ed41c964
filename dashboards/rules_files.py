"""The rules for Prometheus that are shipped: which series they record, and the alerts, as a file.

Recording rules are written by hand (rules/railscope-recording.yml, rules/railscope-joins.yml); alerts are made of code
(dashboards/alerting), and their file is what `railscope dashboards build` writes.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Final

import yaml

from railscope.dashboards.alerting import agents, hardware, jobs, nvlinks, rails
from railscope.dashboards.alerting.alert import RUNBOOKS, Alert, render_groups
from railscope.dashboards.alerting.thresholds import Thresholds
from railscope.dashboards.site import Site

SHIPPED: Final = Path(__file__).parent / "rules"
"""Where the files lie in the source and in the wheel."""
RECORDING: Final = "railscope-recording.yml"
ALERTS: Final = "railscope-alerts.yml"
JOINS: Final = "railscope-joins.yml"
"""Joins with other exporters' series, for those who run them: neither alerts nor dashboards need it."""
_HEAD: Final = f"""\
# Alerts for railscope, made by `railscope dashboards build`: change them there (dashboards/alerting), or with its
# options (--threshold, --runbooks, --selector, --cluster-label).  They need {RECORDING} beside them.
#
# Severities: critical, act now; warning, act in working hours; info, shown on dashboards alone.
#
# Every `for` has its reason beside it.  Hosts decide what a stall is, within a second (railscope's section `stalls:`),
# so alerts on stalls wait only as long as scrapes need; alerts on rates wait until one burst cannot be the reason.
"""


def make_alerts(thresholds: Thresholds | None = None) -> tuple[Alert, ...]:
    """All alerting rules, in the file's order."""
    least = thresholds or Thresholds()
    return tuple(chain.from_iterable(part.alerts(least) for part in (jobs, rails, nvlinks, hardware, agents)))


def render_rules(
    thresholds: Thresholds | None = None, runbooks: str = RUNBOOKS, site: Site | None = None
) -> dict[str, str]:
    """The text of each file of rules, by the file's name."""
    names = site or Site()
    return {
        RECORDING: names.rules((SHIPPED / RECORDING).read_text()),
        JOINS: names.rules((SHIPPED / JOINS).read_text()),
        ALERTS: _HEAD + render_groups(map(names.alert, make_alerts(thresholds)), runbooks),
    }


def read_recorded_names(folder: Path = SHIPPED) -> frozenset[str]:
    """Names of the series that the recording rules make."""
    groups = yaml.safe_load((folder / RECORDING).read_text())["groups"]
    return frozenset(rule["record"] for group in groups for rule in group["rules"])
