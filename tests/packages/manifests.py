"""What is made for Kubernetes: the plain manifests of deploy/kustomize, and what the chart lets `config` hold.

    .venv/bin/python -m tests.packages.manifests

The manifests are what Helm's own engine makes of the chart's defaults, without Helm's labels.  That takes what
tests/packages/requirements.txt names (`make test-packages` installs it): Helm's Go SDK as a library.  The schema of
`config` is made of the agent's options, and takes nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from railscope.agent.config.keys import Kind
from railscope.agent.config.options import COLLECTORS, OPTIONS, Option
from tests.nccl.library import REPOSITORY

CHART: Final = REPOSITORY / "deploy/helm/railscope"
MANIFEST: Final = REPOSITORY / "deploy/kustomize/railscope.yaml"
SCHEMA: Final = CHART / "values.schema.json"
THE_CHARTS: Final = frozenset(
    {"web.listen_address", "web.config_file", "state.directory", "verdicts.socket", "node.name", "path.pod_logs"}
)
"""Keys that the chart sets itself, in the file or as variables, which come before it."""
NAME: Final = "railscope"
"""Of the release and its namespace."""
_PARTS: Final = ("serviceaccount", "configmap", "daemonset")
_HELMS: Final = re.compile(r"^ *(?:app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n", re.MULTILINE)
_CONFIG: Final = re.compile(r'^    "config": \{\n.*?^    \},\n', re.MULTILINE | re.DOTALL)
_OF_METAVARS: Final = {"TIME": "duration", "SIZE": "size", "DIR": "text", "FILE": "text", "PATH": "text", "URL": "text"}
"""Definitions of the schema, by what stands for an option's value in the help."""
_HEAD: Final = "# Made of deploy/helm/railscope by tests/packages/manifests.py: change it there.\n"


def render(values: Mapping[str, Any] | None = None, chart: Path = CHART) -> dict[str, str]:
    """What a chart makes of values, by the template's name; templates that make nothing are left out.

    Raises:
        helm_python.HelmError: the values are wrong by values.schema.json, or a template fails.
    """
    from helm_python.chart import Chart

    rendered = Chart.load(chart).render(dict(values or {}), name=NAME, namespace=NAME)
    named = {Path(path).stem: text for path, text in rendered.items() if text.strip()}
    return {name: text for name, text in named.items() if name != "NOTES"}


def objects(values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The same as Kubernetes' objects."""
    return [one for text in render(values).values() for one in yaml.safe_load_all(text) if one]


def plain() -> str:
    """The text of the manifest."""
    rendered = render()
    return _HEAD + "---\n".join(_HELMS.sub("", rendered[part]).strip("\n") + "\n" for part in _PARTS)


def schema() -> str:
    """The text of values.schema.json, in which `config` has what the agent's file may hold."""
    groups: dict[str, dict[str, object]] = {}
    for option in OPTIONS:
        if option.key and option.key not in THE_CHARTS:
            group, _, key = option.key.partition(".")
            groups.setdefault(group, {})[key] = _of_option(option)
    groups["collectors"] = {one.name: {"type": "boolean"} for one in COLLECTORS}
    shown = ",\n".join(
        f'        {json.dumps(group)}: {{\n          "type": "object",\n          "additionalProperties": false,\n'
        '          "properties": {\n'
        + ",\n".join(f"            {json.dumps(key)}: {json.dumps(one)}" for key, one in keys.items())
        + "\n          }\n        }"
        for group, keys in groups.items()
    )
    head = '    "config": {\n      "type": "object",\n      "additionalProperties": false,\n      "properties": {\n'
    made = f"{head}{shown}\n      }}\n    }},\n"
    return _CONFIG.sub(lambda _: made, SCHEMA.read_text(), count=1)


def _of_option(option: Option) -> dict[str, object]:
    """What one key may hold, as JSON Schema; bounds are the agent's to check."""
    if option.kind is Kind.INTEGER:
        return {"type": "integer"}
    if option.kind is Kind.LIST:
        return {"$ref": "#/definitions/list"}
    if "|" in option.metavar:
        return {"enum": option.metavar.split("|")}
    return {"$ref": f"#/definitions/{_OF_METAVARS.get(option.metavar, 'scalar')}"}


def main() -> None:
    SCHEMA.write_text(schema())
    print(SCHEMA)
    if importlib.util.find_spec("helm_python") is None:
        print(f"{MANIFEST}: not made: Helm's library is missing, run 'make test-packages'")
        return
    MANIFEST.write_text(plain())
    print(MANIFEST)


if __name__ == "__main__":
    main()
