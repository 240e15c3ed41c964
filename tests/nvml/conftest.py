"""The simulated NVML library, loaded behind nvidia-ml-py for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.nvml.stub import Stub, build_stub


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """No GPUs at first; what hangs at the end is let go."""
    simulated = Stub(stub_library)
    simulated.say("reset")
    monkeypatch.setattr(pynvml, "nvmlLib", simulated.loaded)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield simulated
    simulated.say("reset")
