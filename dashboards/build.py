"""Dashboards and rules as files: what Grafana and Prometheus take, the same text from the same code every time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from railscope.dashboards import agent, fleet, job, node, rules_files, stall
from railscope.dashboards.alerting.thresholds import Thresholds

COMMITTED: Final = Path(__file__).parent / "json"
"""Where the built files lie in the source and in the wheel."""

_MAKERS: Final = (fleet.dashboard, job.dashboard, node.dashboard, stall.dashboard, agent.dashboard)


def render_dashboards() -> dict[str, str]:
    """The JSON text of each dashboard's file, by the file's name."""
    made = {}
    for maker in _MAKERS:
        dashboard = maker().build()
        made[f"{dashboard.uid}.json"] = (
            json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        )
    return made


def write_all(folder: Path | None, thresholds: Thresholds, runbooks: str) -> list[Path]:
    """Write dashboards and rules into a folder, which is made if need be; returns the files that changed.

    Args:
        folder: None: beside the code, where the shipped ones lie.
        thresholds: of the alerts.
        runbooks: the address under which dashboards/runbooks is served.

    Raises:
        OSError: a file cannot be written.
    """
    return [
        *_write(folder or COMMITTED, render_dashboards()),
        *_write(folder or rules_files.SHIPPED, rules_files.render_rules(thresholds, runbooks)),
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
