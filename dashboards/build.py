"""The dashboards as JSON: what Grafana takes, the same text from the same code every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from railscope.dashboards import agent, fleet, job, node, stall

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


def write_dashboards(folder: Path) -> list[Path]:
    """Write all dashboards into a folder, which is made if need be; returns the files that changed.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, text in render_dashboards().items():
        file = folder / name
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)
            changed.append(file)
    return changed
