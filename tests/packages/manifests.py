"""The plain manifests of deploy/kustomize: what Helm's own engine makes of the chart's defaults, without Helm's labels.

    .venv/bin/python -m tests.packages.manifests

It takes what tests/packages/requirements.txt names (`make test-packages` installs it): Helm's Go SDK as a library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.nccl.library import REPOSITORY

CHART: Final = REPOSITORY / "deploy/helm/railscope"
MANIFEST: Final = REPOSITORY / "deploy/kustomize/railscope.yaml"
NAME: Final = "railscope"
"""Of the release and its namespace."""
_PARTS: Final = ("serviceaccount", "configmap", "daemonset")
_HELMS: Final = re.compile(r"^ *(?:app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n", re.MULTILINE)
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


def main() -> None:
    MANIFEST.write_text(plain())
    print(MANIFEST)


if __name__ == "__main__":
    main()
