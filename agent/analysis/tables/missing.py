"""The error message if the packages of the analyses are not installed."""

from __future__ import annotations

from typing import Final

from railscope.probes.installation import remedy_for_missing_extra

_PACKAGES: Final = frozenset({"duckdb", "ibis", "PIL", "pyarrow", "scipy"})


def not_installed(error: ModuleNotFoundError) -> str:
    """The line that tells the user which library of the analyses is not installed.

    Raises:
        ModuleNotFoundError: it is none of the analyses' packages that is missing, but something of ours.
    """
    package = (error.name or "").split(".")[0]
    if package not in _PACKAGES:
        raise error
    return f"{package} is not installed: {remedy_for_missing_extra('analysis')}"
