"""How this railscope was installed, and so what puts right that a file or a package is missing.

It runs from a checkout, from the tree of a Debian or RPM package on the system's Python, or from an environment that
pip made of a wheel.  No advice here names railscope to a package index: it is distributed as files.

Source: PEP 508 (markers of the extras among an installation's requirements).
"""

from __future__ import annotations

import sys
from pathlib import Path

TYPE_CHECKING = False  # typing's own takes milliseconds to import
if TYPE_CHECKING:
    from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
"""Where the folders of ours lie."""
UNKNOWN: Final = "unknown"
_REVISION: Final = Path(__file__).with_name("revision.txt")
"""`make build` writes it."""
_SYSTEMS_OWN: Final = Path("/usr/lib/railscope")
"""The tree of the Debian and the RPM package."""
_DEBIANS_VERSION: Final = Path("/etc/debian_version")
"""Ubuntu has it too."""
_PACKAGED: Final = {"top": "python3-rich"}
"""Extras that Debian 12 and newer, and Fedora, have all packages of."""
_PACKAGED_ALONE: Final = {"msgspec": "python3-msgspec"}
"""Packages of an extra that Debian 13 and newer have, and Debian 12 has not, by what is imported."""
_SHIPPED: Final = frozenset({"nvlink"})
"""Extras that the package brings itself."""
_WHEEL: Final = "railscope-*.whl"


def built_from(file: Path = _REVISION) -> str:
    """The commit that this railscope was built from, with `-dirty` where files differed; `unknown` where none says."""
    try:
        return file.read_text().strip() or UNKNOWN
    except OSError:
        return UNKNOWN


def in_checkout(root: Path = ROOT) -> bool:
    """Whether `root` is a checkout, where files are built in place."""
    return (root / "build.mk").is_file()


def remedy_for_missing_file(root: Path = ROOT, *, compiled: bool = True) -> str:
    """What to do where a file of railscope's own is missing, damaged or of another version.

    `compiled`: it is built from sources, and not one of them.
    """
    if in_checkout(root):
        return f"run '{'make build' if compiled else 'git status'}' in {root}"
    if root.is_relative_to(_SYSTEMS_OWN):
        if _by_rpm():
            return "run 'dnf reinstall' with the .rpm of this version"
        return "run 'apt-get install --reinstall railscope' with the .deb of this version"
    return f"install railscope again: run '{sys.executable} -m pip install --force-reinstall {_WHEEL}' on its wheel"


def remedy_for_missing_extra(extra: str, root: Path = ROOT) -> str:
    """How to install the packages of an extra of pyproject.toml, such as `analysis`."""
    if root.is_relative_to(_SYSTEMS_OWN):
        if extra in _SHIPPED:
            return remedy_for_missing_file(root)
        if package := _PACKAGED.get(extra):
            return f"run '{'dnf' if _by_rpm() else 'apt-get'} install {package}'"
        environment = f"python3 -m venv DIR && DIR/bin/pip install './{_WHEEL}[{extra}]'"
        return f"run railscope's wheel in an environment of its own: {environment}"
    wanted = _packages_of(extra) or [f"./{_WHEEL}[{extra}]"]
    return f"run '{sys.executable} -m pip install {' '.join(map(_quoted, wanted))}'"


def remedy_for_missing_package(module: str, extra: str, root: Path = ROOT) -> str:
    """How to install `module`, a package of `extra`: alone where the system has it, else all of the extra."""
    remedy = remedy_for_missing_extra(extra, root)
    package = _PACKAGED_ALONE.get(module)
    if package is None or _by_rpm() or not root.is_relative_to(_SYSTEMS_OWN):
        return remedy
    return f"run 'apt-get install {package}' on Debian 13 and newer; elsewhere {remedy}"


def _by_rpm() -> bool:
    """Whether it was the RPM package that installed us, and not the Debian one: by whose system this is."""
    return not _DEBIANS_VERSION.exists()


def _packages_of(extra: str) -> list[str]:
    """The requirements of an extra, without its marker; empty where the installation does not tell."""
    # Only ever for an error.
    import re
    from importlib.metadata import PackageNotFoundError, requires

    try:
        told = requires("railscope") or ()
    except PackageNotFoundError:
        return []
    of_extra = re.compile(rf"""(?P<package>[^;]+?)\s*;\s*extra\s*==\s*["']{re.escape(extra)}["']""")
    wanted = [found["package"] for one in told if (found := of_extra.fullmatch(one))]
    packages: list[str] = []
    for one in wanted:
        # An extra may hold another one of ours.
        own = re.fullmatch(r"railscope\[(\w+)\]", one)
        packages += _packages_of(own[1]) if own else [one]
    return packages


def _quoted(requirement: str) -> str:
    """For the inside of single quotes."""
    import shlex

    return requirement if shlex.quote(requirement) == requirement else f'"{requirement}"'
