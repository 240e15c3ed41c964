"""The packages of the distribution: each top-level folder is installed below `railscope`.

No project's own `agent/` or `probes/` on the path then takes the place of ours.  setuptools finds packages by their
folders, and cannot be told such a prefix in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("agent", "dashboards", "exporters", "probes", "testbed")

setup(
    packages=[f"railscope.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])],
    package_dir={f"railscope.{folder}": folder for folder in FOLDERS},
)
