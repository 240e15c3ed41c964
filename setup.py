"""The packages of the distribution, and what is compiled for one kind of machine.

Each top-level package but the tests is installed below `railscope`, so that no project's own `agent/` or `probes/` on
the path takes the place of ours: setuptools finds packages by their folders, and cannot be told such a prefix in
pyproject.toml.

A wheel is for one machine, because of the library that reads counters (probes/native/beats.c): this one, or the one
that RAILSCOPE_MACHINE names (`x86_64`, `aarch64`), for which CC names a compiler.  It holds that machine's BPF objects
alone.  The demo's workload is compiled where the demo runs, unless RAILSCOPE_WHEEL_TESTBED asks for it: it wants a
newer C library than the rest.

Source: PEP 600; the versions of glibc's symbols are those that tests/unit/test_wheel.py finds.
"""

import os
import platform
import subprocess
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
TESTS = "tests"
FOLDERS = sorted({file.parent.name for file in HERE.glob("*/__init__.py")} - {TESTS})
MACHINE = os.environ.get("RAILSCOPE_MACHINE") or platform.machine()
BPF = {"x86_64": "x86", "aarch64": "arm64"}
TAG = f"manylinux_2_17_{MACHINE}"
WITH_TESTBED = bool(os.environ.get("RAILSCOPE_WHEEL_TESTBED"))


class BuildForMachine(build_py):
    """Compiles what is missing, and leaves out what is for other machines."""

    def run(self) -> None:
        if MACHINE not in BPF:
            raise SystemExit(f"there is no railscope for {MACHINE}: set RAILSCOPE_MACHINE to one of {', '.join(BPF)}")
        if not self.editable_mode:
            self._compile()
        super().run()

    def build_package_data(self) -> None:
        # Whatever an earlier build has left in its folder.
        self.data_files = [
            (*place, [name for name in names if self._belongs(name)]) for *place, names in self.data_files
        ]
        super().build_package_data()

    def _belongs(self, name: str) -> bool:
        if name.endswith(".bpf.o"):
            return name.endswith(f".{BPF[MACHINE]}.bpf.o")
        if Path(name).parent.name == "bin":
            return WITH_TESTBED
        if name.endswith("beats.c"):
            return False
        if name.endswith(".so"):
            return name.endswith(f".{MACHINE}.so")
        return True

    def _compile(self) -> None:
        suffix = f".{BPF[MACHINE]}.bpf.o"
        objects = [
            source.with_name(source.name.replace(".bpf.c", suffix)) for source in HERE.glob("probes/bpf/*.bpf.c")
        ]
        wanted = [HERE / f"probes/native/beats.{MACHINE}.so", *objects]
        missing = [str(file.relative_to(HERE)) for file in wanted if not file.exists()]
        if missing:
            compiler = os.environ.get("CC", "gcc")
            done = subprocess.run(["make", "--silent", "-f", "build.mk", *missing, f"CC={compiler}"], cwd=HERE)
            if done.returncode != 0:
                raise SystemExit("railscope is built with make, gcc and, for BPF objects, clang, llvm and libbpf-dev")


class ForMachine(Distribution):
    """What is installed where machine code goes, though no extension module is in it."""

    def has_ext_modules(self) -> bool:
        return True


class WheelForMachine(bdist_wheel):
    """A wheel for every CPython on one machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", f"linux_{MACHINE}" if WITH_TESTBED else TAG


setup(
    packages=[f"railscope.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])],
    package_dir={f"railscope.{folder}": folder for folder in FOLDERS},
    distclass=ForMachine,
    cmdclass={"build_py": BuildForMachine, "bdist_wheel": WheelForMachine},
)
