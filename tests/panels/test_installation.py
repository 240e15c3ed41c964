"""What is installed for the browser is pinned and names no server; what is missing is asked for plainly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.panels import bundle
from tests.panels.__main__ import COULD_NOT_RUN, main
from tests.panels.chromium import Browser


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has neither the programs nor the packages."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(bundle, "FOLDER", tmp_path)


@pytest.mark.usefixtures("bare")
def test_without_npm_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--install"]) == COULD_NOT_RUN
    said = capsys.readouterr().err
    assert said == "panels: npm is missing: install Debian's package npm, or run 'make packages-panels'\n"


@pytest.mark.usefixtures("bare")
def test_without_chromium_it_says_what_to_install() -> None:
    with pytest.raises(bundle.PanelsError, match="chromium is missing: install Debian's package chromium"):
        Browser().__enter__()


@pytest.mark.usefixtures("bare")
def test_without_the_packages_it_says_how_to_get_them() -> None:
    with pytest.raises(bundle.PanelsError, match="not installed: run 'make test-panels'"):
        bundle.bundle()


def test_versions_are_pinned_and_no_server_is_named() -> None:
    wanted = json.loads((bundle.HERE / "package.json").read_text())["dependencies"]
    lock = json.loads((bundle.HERE / "package-lock.json").read_text())["packages"]
    for name, version in wanted.items():
        assert lock[f"node_modules/{name}"]["version"] == version
    assert all("integrity" in one for path, one in lock.items() if path)
    assert not [path for path, one in lock.items() if "resolved" in one]
