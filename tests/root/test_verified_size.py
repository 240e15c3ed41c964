"""How much the verifier has to look at: most of the time that loading takes, and so of an agent's start."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import pytest

from railscope.probes.loading.bpf_syscall import BPF_OBJ_GET_INFO_BY_FD, bpf
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.driver_calls import DriverCalls
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.transfers.programs import TransferPrograms
from tests.root.probe_targets import MODES

pytestmark = pytest.mark.root

_MOST_INSTRUCTIONS: Final = 12_000
"""Of one program, each counted in every state in which the verifier comes to it; the longest takes 11,600."""
_INFO_BYTES: Final = 224
_VERIFIED_AT: Final = 216
"""`verified_insns` of struct bpf_prog_info, Linux 5.16."""


def verified_instructions(program_fd: int) -> int:
    info = np.zeros(_INFO_BYTES, np.uint8)
    bpf(BPF_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", program_fd, _INFO_BYTES, info.ctypes.data), "ask about a program")
    return int(info[_VERIFIED_AT : _VERIFIED_AT + 4].view("<u4")[0])


@pytest.mark.parametrize(("attach", "enqueue_time"), MODES)
def test_no_program_is_long_to_verify(attach: AttachKind, enqueue_time: EnqueueTime) -> None:
    programs = NcclPrograms.load(ProgramSettings(attach=attach, enqueue_time=enqueue_time))
    try:
        internals = Internals.load(programs)
        driver = DriverCalls.load(programs)
        transfers = TransferPrograms.load(programs)
        objects = programs._loaded, internals._loaded, driver._loaded, transfers._loaded
        loaded = {name: fd for one in objects for name, fd in one.program_fds.items()}
        verified = {name: verified_instructions(fd) for name, fd in loaded.items()}
        transfers.close()
        driver.close()
        internals.close()
    finally:
        programs.close()
    if not any(verified.values()):
        pytest.skip("this kernel does not tell how much it verified")
    assert {name: count for name, count in verified.items() if count > _MOST_INSTRUCTIONS} == {}
