"""How the committed dashboards show labels and counts: whole numbers, short legends, text that stays text."""

from __future__ import annotations

import json

from railscope.dashboards import build


def test_a_stall_counts_ranks_without_fractions_and_its_legends_leave_out_what_a_rank_tells() -> None:
    content = json.loads((build.COMMITTED / "railscope-stall.json").read_text())
    every = [one for panel in content["panels"] for one in (panel, *panel.get("panels", ()))]
    panels = {(panel["type"], panel["title"]): panel for panel in every}
    for kind, title in (
        ("stat", "Ranks stalled"),
        ("stat", "Operations behind"),
        ("timeseries", "Stalled, by cause"),
        ("timeseries", "Operations behind"),
        ("timeseries", "Operations not complete"),
    ):
        assert panels[kind, title]["fieldConfig"]["defaults"]["decimals"] == 0, title
    assert "decimals" not in panels["timeseries", "Operations entered"]["fieldConfig"]["defaults"], "calls a second"
    legends = {target.get("legendFormat", "") for panel in panels.values() for target in panel.get("targets", ())}
    assert {"rank {{rank}}", "{{rank}} {{op}} {{cause}}"} <= legends
    assert not [legend for legend in legends if "{{rank}}" in legend and "{{instance}}" in legend]


def test_a_table_shows_labels_as_text_also_those_that_look_like_numbers() -> None:
    tables = 0
    for file in sorted(build.COMMITTED.glob("*.json")):
        content = json.loads(file.read_text())
        for panel in [one for row in content["panels"] for one in (row, *row.get("panels", ()))]:
            renamed = [one["options"].get("renameByName") for one in panel.get("transformations", ())]
            if panel["type"] != "table" or not any(renamed):
                continue
            tables += 1
            assert panel["fieldConfig"]["defaults"]["unit"] == "string", panel["title"]
            units = {
                one["matcher"]["options"]: value["value"]
                for one in panel["fieldConfig"]["overrides"]
                for value in one["properties"]
                if value["id"] == "unit"
            }
            assert units.keys() == {names["Value"] for names in renamed if names and "Value" in names}, panel["title"]
            assert set(units.values()) <= {"none", "percentunit", "short"}, panel["title"]
    assert tables > 10
