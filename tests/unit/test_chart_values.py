"""What the chart's schema lets `config` hold is what the agent's file takes, but for what the chart sets itself."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest

from railscope.agent.config.options import FILE_KEYS
from tests.nccl.library import REPOSITORY
from tests.packages.manifests import SCHEMA, THE_CHARTS, schema

CONFIG: Final[dict[str, Any]] = json.loads(SCHEMA.read_text())["properties"]["config"]
DEFINITIONS: Final[dict[str, Any]] = json.loads(SCHEMA.read_text())["definitions"]


def test_it_is_made_of_the_agents_options() -> None:
    assert SCHEMA.read_text() == schema(), "run: .venv/bin/python -m tests.packages.manifests"


def test_every_key_is_there_but_those_that_the_chart_sets() -> None:
    groups = CONFIG["properties"]
    assert {f"{group}.{key}" for group in groups for key in groups[group]["properties"]} == set(FILE_KEYS) - THE_CHARTS


def test_the_chart_sets_what_is_refused() -> None:
    folder = SCHEMA.parent / "templates"
    templates = "".join((folder / name).read_text() for name in ("daemonset.yaml", "_helpers.tpl"))
    for key in THE_CHARTS - {"path.pod_logs"}:
        group, _, name = key.partition(".")
        assert f'"{name}"' in templates or f"RAILSCOPE_{group}_{name}".upper() in templates, key
    assert "mountPath: /var/log/pods" in templates


@pytest.mark.parametrize(
    ("definition", "right", "wrong"),
    [
        ("duration", ["100ms", "1.5s", "1m30s", "500000µs"], ["3", "10 s", "s", "1w"]),
        ("size", ["65536", "64KiB", "8MiB"], ["8MB", "-1", "1.5MiB"]),
    ],
)
def test_its_patterns_take_what_the_agent_takes(definition: str, right: list[str], wrong: list[str]) -> None:
    pattern = re.compile(DEFINITIONS[definition]["pattern"])
    key = {"duration": FILE_KEYS["probes.scan_interval"], "size": FILE_KEYS["rails.small_message"]}[definition]
    for text in right:
        assert pattern.search(text)
        key.read(text)
    for text in wrong:
        assert not pattern.search(text)
        with pytest.raises(ValueError, match="is not a"):
            key.read(text)


def test_values_and_the_shipped_file_name_the_same_groups() -> None:
    groups = set(re.findall(r"^(\w+):$", (REPOSITORY / "deploy/railscope.yml").read_text(), re.MULTILINE))
    assert groups - {"state", "verdicts"} == set(CONFIG["properties"])
