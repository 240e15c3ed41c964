"""One virtual machine a kernel, in which everything is tried once; the tests look at what it saw."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from railscope.testbed.nccl.build import build
from tests.vm.machine import KERNELS, MachineMissing, boot

BOOT_SECONDS: Final = 1500
"""For everything, on a processor that is emulated by one that others use, too."""
GUEST_PYTHON: Final = (3, 11)
"""Debian 12's: it runs the packages of this Python's virtual environment."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen on one kernel."""

    kernel: tuple[int, int]
    parts: Mapping[str, Mapping[str, Any]]
    """Of each part its status, what it printed, and its errors."""

    def __getitem__(self, part: str) -> Any:
        """The facts of a part that came to its end well."""
        run = self.parts[part]
        assert run["status"] == 0, f"{run['printed']}\n{run['errors']}"
        return json.loads(run["printed"])


@pytest.fixture(scope="session", params=["6.1", "6.12"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Boot that kernel, try everything, power off."""
    if os.environ.get("RAILSCOPE_TEST_VM") != "1":
        pytest.skip("minutes of emulation: run 'make test-vm' as root")
    if platform.machine() != "x86_64":
        pytest.skip("the virtual machine's processor is x86_64, and the built workload is this machine's")
    if sys.version_info[:2] != GUEST_PYTHON:
        pytest.skip("the virtual machine has Python 3.11: its packages come from a virtual environment of that version")
    build()  # the machine can read the checkout, and not write into it
    release = next((path.name for path in KERNELS.glob(f"{request.param}.*")), request.param)
    try:
        outcome = boot(release, "python3 -m tests.vm.guest", tmp_path_factory.mktemp("vm"), seconds=BOOT_SECONDS)
    except MachineMissing as missing:
        pytest.fail(str(missing))
    assert outcome.status == 0, f"{outcome.status}: the machine did not come to its end\n{outcome.console}"
    found = json.loads(outcome.result)
    major, minor = map(int, found["release"].split(".")[:2])
    assert f"{major}.{minor}" == request.param
    return Seen((major, minor), found["parts"])
