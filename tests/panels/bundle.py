"""The page that draws dashboards: Grafana's component packages, installed and bundled below `.venv`.

Nothing of Grafana's is kept in this repository, only the versions (`package.json`) and the digests
(`package-lock.json`) of what is asked for.  The packages take 500 MB, which is why they are no part of `make test`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
FOLDER: Final = HERE.parents[1] / ".venv" / "panels"
ICONS: Final = FOLDER / "node_modules" / "@grafana" / "ui" / "dist" / "public" / "img" / "icons"
"""Pictures that components ask their server for."""
_NAMED: Final = ("package.json", "package-lock.json", ".npmrc")
_DATA_URLS: Final = ("svg", "png", "gif", "ttf", "woff", "woff2")
_INSTALL_SECONDS: Final = 900
_BUNDLE_SECONDS: Final = 300


class PanelsError(RuntimeError):
    """Panels cannot be drawn here; the message is one line and says what to do."""


def program(name: str, package: str) -> str:
    """The path of a program.

    Raises:
        PanelsError: it is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise PanelsError(f"{name} is missing: install Debian's package {package}, or run 'make packages-panels'")
    return found


def install() -> None:
    """Fetch the packages, unless these very ones are there.

    Raises:
        PanelsError: npm is missing, or cannot fetch them.
    """
    npm = program("npm", "npm")
    done = FOLDER / "installed"
    wanted = "".join((HERE / name).read_text() for name in _NAMED)
    if done.is_file() and done.read_text() == wanted:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    for name in _NAMED:
        shutil.copyfile(HERE / name, FOLDER / name)
    _run([npm, "ci"], "npm cannot fetch Grafana's component packages", _INSTALL_SECONDS)
    done.write_text(wanted)


def bundle() -> Path:
    """The folder with `bundle.js` and `bundle.css`, made anew from what is installed.

    Raises:
        PanelsError: the packages are not installed, or do not go together with the page's code.
    """
    if not (FOLDER / "installed").is_file():
        raise PanelsError("Grafana's component packages are not installed: run 'make test-panels', or add --install")
    program("node", "nodejs")
    version = json.loads((HERE / "package.json").read_text())["dependencies"]["@grafana/ui"]
    out = FOLDER / "page"
    command = [str(FOLDER / "node_modules" / ".bin" / "esbuild"), f"bundle={HERE / 'page' / 'main.tsx'}", "--bundle"]
    command += [f"--outdir={out}", "--format=iife", "--jsx=automatic", "--minify", "--log-level=error"]
    # The packages name two versions of the router; one of them has all that they use.
    command += ["--alias:react-router-dom-v5-compat=react-router-dom", "--define:global=window"]
    command += ['--define:process.env.NODE_ENV="production"', f'--define:process.env.GRAFANA_PACKAGES="{version}"']
    command += [f"--loader:.{ending}=dataurl" for ending in _DATA_URLS]
    _run(command, "the page cannot be bundled", _BUNDLE_SECONDS)
    return out


def _run(command: Sequence[str], what: str, seconds: float) -> None:
    environment = os.environ | {"NODE_PATH": str(FOLDER / "node_modules")}
    try:
        done = subprocess.run(
            command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise PanelsError(f"{what}: not within {seconds:g} s") from None
    if done.returncode != 0:
        raise PanelsError(f"{what}:\n{(done.stderr or done.stdout).strip()[-2000:]}")
