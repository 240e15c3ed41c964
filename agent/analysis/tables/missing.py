"""The error message if the packages of the analyses and of what reads others' files are not installed."""

from __future__ import annotations

from typing import Final

from railscope.probes.installation import remedy_for_missing_package

DISTRIBUTIONS: Final = {
    "PIL": "pillow",
    "duckdb": "duckdb",
    "google": "protobuf",
    "ibis": "ibis-framework",
    "msgspec": "msgspec",
    "pyarrow": "pyarrow",
    "scipy": "scipy",
}
"""The packages of the extra `analysis`: as they are imported, and as pip calls them."""


def not_installed(error: ModuleNotFoundError) -> str:
    """The line that tells the user which library of the analyses is not installed.

    Raises:
        ModuleNotFoundError: it is none of the analyses' packages that is missing, but something of ours.
    """
    package = (error.name or "").split(".")[0]
    if package not in DISTRIBUTIONS:
        raise error
    remedy = remedy_for_missing_package(package, "analysis")
    return f"{DISTRIBUTIONS[package]} is not installed: {remedy}"
