"""The packages of the distribution: each top-level package but the tests is installed below `railscope`.

No project's own `agent/` or `probes/` on the path then takes the place of ours.  setuptools finds packages by their
folders, and cannot be told such a prefix in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

TESTS = "tests"
FOLDERS = sorted({file.parent.name for file in Path(__file__).parent.glob("*/__init__.py")} - {TESTS})

setup(
    packages=[f"railscope.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])],
    package_dir={f"railscope.{folder}": folder for folder in FOLDERS},
)
