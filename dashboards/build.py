"""Dashboards and rules as files: what Grafana and Prometheus take, the same text from the same code every time.

In a folder of a site's own lies a mixin beside them, which gives both to Jsonnet, under the names that mixins use
(https://monitoring.mixins.dev).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from railscope.dashboards import agent, fleet, job, node, rules_files, stall
from railscope.dashboards.alerting.thresholds import Thresholds
from railscope.dashboards.site import Site

COMMITTED: Final = Path(__file__).parent / "json"
"""Where the built files lie in the source and in the wheel."""

MIXIN: Final = "mixin.libsonnet"
_MAKERS: Final = (fleet.dashboard, job.dashboard, node.dashboard, stall.dashboard, agent.dashboard)


def render_dashboards(site: Site | None = None) -> dict[str, str]:
    """The JSON text of each dashboard's file, by the file's name."""
    names = site or Site()
    made = {}
    for maker in _MAKERS:
        dashboard = maker().build()
        content = names.dashboard(json.loads(json.dumps(dashboard, cls=JSONEncoder)))
        made[f"{dashboard.uid}.json"] = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return made


def render_mixin(dashboards: Iterable[str], rules: Mapping[str, str]) -> str:
    """The mixin's text.

    Args:
        dashboards: names of their files, which lie beside it.
        rules: the text of each file of rules, by its name.  They stand in the mixin as JSON: Jsonnet 0.18 reads no YAML
            in which a line of PromQL is a word.
    """
    files = "\n".join(f"    '{name}': import '{name}'," for name in dashboards)
    recording, alerts = (
        json.dumps(yaml.safe_load(rules[name]), indent=1, ensure_ascii=False)
        for name in (rules_files.RECORDING, rules_files.ALERTS)
    )
    return f"""\
// railscope's dashboards and rules as a mixin, made by `railscope dashboards build`: its options --selector,
// --cluster-label, --runbooks and --threshold are what a mixin's _config would be.
{{
  grafanaDashboards+:: {{
{files}
  }},
  prometheusRules+:: {recording},
  prometheusAlerts+:: {alerts},
}}
"""


def write_all(folder: Path | None, thresholds: Thresholds, runbooks: str, site: Site | None = None) -> list[Path]:
    """Write dashboards and rules, and a mixin of both, into a folder, made if need be; returns the files that changed.

    Args:
        folder: None: beside the code, where the shipped ones lie, which have no mixin.
        thresholds: of the alerts.
        runbooks: the address under which dashboards/runbooks is served.
        site: what the site's Prometheus calls things.

    Raises:
        OSError: a file cannot be written.
    """
    dashboards, rules = render_dashboards(site), rules_files.render_rules(thresholds, runbooks, site)
    return [
        *_write(folder or COMMITTED, dashboards),
        *_write(folder or rules_files.SHIPPED, rules),
        *(_write(folder, {MIXIN: render_mixin(dashboards, rules)}) if folder is not None else ()),
    ]


def _write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, text in texts.items():
        file = folder / name
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)
            changed.append(file)
    return changed
