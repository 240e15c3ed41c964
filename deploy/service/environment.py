"""Makes the environment that the service runs from: the agent, what it needs, and nothing else.

    python3 deploy/service/environment.py make DIRECTORY
    python3 deploy/service/environment.py check DIRECTORY

`make` downloads the packages of requirements.txt, which pins each with its hashes, builds railscope's wheel from this
checkout with what build-requirements.txt pins, and lays both into a virtual environment without pip.  The network is
needed before DIRECTORY is touched, so that a failed download leaves the environment that was there.  `check` says what
does not belong into such an environment.  The standard library does, because this runs before anything is installed.

Sources: PEP 376 and 427 (what an installed package holds), site.py of Python (`.pth`: a line that begins with `import`
is run at every start).
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))

import sbom

CHECKOUT: Final = Path(__file__).resolve().parents[2]
LOCK: Final = Path(__file__).with_name("requirements.txt")
BUILD_LOCK: Final = Path(__file__).with_name("build-requirements.txt")
SOURCES: Final = ("pyproject.toml", "setup.py", "build.mk", "README.md", "LICENSE")
"""Beside the packages, what a wheel is made of."""
COMMANDS: Final = ("railscope",)
"""What stays in bin beside Python; other packages bring compilers and examples."""
HASHED: Final = ("--only-binary", ":all:", "--require-hashes", "--requirement")
DOCUMENTS: Final = ("README.md", "LICENSE", "CHANGELOG.md", "deploy", "docs")
"""What an administrator reads or installs; laid into share/doc/railscope."""
_PINNED: Final = re.compile(r"^([A-Za-z0-9._-]+)==", re.MULTILINE)


class NoEnvironment(Exception):
    """The environment cannot be made; the message says in a line what to do."""


def make(directory: Path) -> None:
    """Make the environment anew.

    Raises:
        NoEnvironment: the directory holds something else, or a download or the build fails.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / "pyvenv.cfg").exists():
        raise NoEnvironment(f"{directory} holds something that is no environment: name another directory")
    with tempfile.TemporaryDirectory(prefix="railscope-service-") as scratch:
        tool, wheels = Path(scratch, "tool"), Path(scratch, "wheels")
        venv.create(tool, with_pip=True)
        _pip(tool, "download", "--dest", wheels, *HASHED, LOCK)
        _pip(tool, "install", *HASHED, BUILD_LOCK)
        _pip(
            tool,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            wheels,
            _sources(Path(scratch, "sources")),
        )
        (own,) = wheels.glob("railscope-*.whl")
        if directory.exists():
            shutil.rmtree(directory)
        # Links to the system's Python, whose security updates the service gets with the rest of the system.
        venv.create(directory, symlinks=True, with_pip=False)
        target = ("--python", directory / "bin/python", "install", "--no-index", "--find-links", wheels, "--no-compile")
        _pip(tool, *target, *HASHED, LOCK)
        _pip(tool, *target, "--no-deps", own)
        for command in (directory / "bin").iterdir():
            if command.name not in COMMANDS and not command.name.startswith("python"):
                command.unlink()
        _compile(directory)
        _lay_documents(directory)
        sbom.write(directory / "share/doc/railscope/sbom.cdx.json", _site_packages(directory), wheels)


def problems_of(directory: Path) -> Iterator[str]:
    """What does not belong into the service's environment."""
    site_packages = _site_packages(directory)
    locked = {_normal(name) for name in _PINNED.findall(LOCK.read_text())}
    present = {_normal(one.metadata["Name"]) for one in distributions(path=[str(site_packages)])}
    for name in sorted(present - locked - {"railscope"}):
        yield f"the package {name} is not in {LOCK.name}"
    for name in sorted({"railscope"} - present):
        yield f"the package {name} is missing"
    for file in sorted(site_packages.rglob("*.pth")):
        if any(line.startswith(("import ", "import\t")) for line in file.read_text().splitlines()):
            yield f"{file} runs code at every start of Python"
    owner = os.geteuid()
    for path in (directory, *directory.rglob("*")):
        status = path.lstat()
        if status.st_uid != owner:
            yield f"{path} belongs to the user {status.st_uid}"
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            yield f"{path} can be written by others"


def barriers_of(directory: Path) -> Iterator[str]:
    """What keeps another user, such as the service's, from running it."""
    interpreter = (directory / "bin/python").resolve()
    for folder in dict.fromkeys((*directory.resolve().parents, *interpreter.parents)):
        if not folder.stat().st_mode & stat.S_IXOTH:
            yield f"the service's user cannot enter {folder}, which leads to {directory} or {interpreter}"


def _sources(folder: Path) -> Path:
    """A copy of what the wheel is made of: a build beside the checkout would take up what an earlier one left there."""
    folder.mkdir()
    for name in SOURCES:
        shutil.copy2(CHECKOUT / name, folder / name)
    for package in CHECKOUT.glob("*/__init__.py"):
        if package.parent.name != "tests":
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package.parent, folder / package.parent.name, ignore=ignored)
    return folder


def _compile(directory: Path) -> None:
    """Write bytecode, which the service's user may not."""
    libraries = _site_packages(directory)
    if not compileall.compile_dir(libraries, quiet=2, stripdir=None, workers=0):
        raise NoEnvironment(f"some files below {libraries} do not compile")


def _lay_documents(directory: Path) -> None:
    documents = directory / "share/doc/railscope"
    for name in DOCUMENTS:
        source, target = CHECKOUT / name, documents / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _pip(tool: Path, *arguments: str | Path) -> None:
    command = [str(tool / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise NoEnvironment(f"pip {arguments[0]} failed:\n{done.stdout.strip()}")


def _site_packages(directory: Path) -> Path:
    found = list(directory.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise NoEnvironment(f"{directory} holds no environment")
    return found[0]


def _normal(name: str) -> str:
    """See PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where the environment holds what it should not, 2 where it cannot be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("make", "check"))
    parser.add_argument("directory", type=Path)
    given = parser.parse_args(arguments)
    # Everyone may read and enter, the owner alone may write.
    os.umask(0o022)
    try:
        if given.action == "make":
            make(given.directory)
        problems = [*problems_of(given.directory), *barriers_of(given.directory)]
    except NoEnvironment as error:
        print(error, file=sys.stderr)
        return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
