"""What a GPU says of its own condition: memory, PCIe, clocks, and the bit errors of its NVLinks.

Everything but what slows it are NVML's field values (nvml.h, `NVML_FI_DEV_*`), asked for in a few calls.  A driver may
refuse a call for one field that it does not know, so fields are asked for by the generation that brought them, and
what has no value on this GPU is not asked for again for a while.  DCGM shows the same as DCGM_FI_DEV_ECC_SBE_VOL_TOTAL,
DCGM_FI_DEV_ROW_REMAP_FAILURE, DCGM_FI_DEV_PCIE_REPLAY_COUNTER, DCGM_FI_DEV_CLOCKS_EVENT_REASONS and so on.

A rate of bit errors is packed as nvml.h says: mantissa in bits 8 to 11, negative power of ten in bits 0 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from railscope.probes.nvlink.nvml import Handle, NvmlError, NvmlSession, Questions

_ECC: Final = {3: ("corrected", "volatile"), 4: ("uncorrected", "volatile"), 5: ("corrected", "aggregate"),
               6: ("uncorrected", "aggregate")}  # fmt: skip
"""(kind, since): volatile since the driver was loaded, aggregate since the GPU was made."""
_REMAPPED_ROWS: Final = {142: "corrected", 143: "uncorrected"}
"""By the errors that were the reason."""
_REMAP_PENDING: Final = 144
_REMAP_FAILED: Final = 145
_PCIE_REPLAYS: Final = 94
_PCIE_ERRORS: Final = {
    173: "correctable",
    174: "nak_received",
    175: "receiver",
    176: "bad_tlp",
    177: "nak_sent",
    178: "bad_dllp",
    179: "non_fatal",
    180: "fatal",
    181: "unsupported_request",
    182: "lcrc",
    183: "lane",
}
_RECOVERY_ACTION: Final = 230
_RECOVERY_ACTIONS: Final = (
    *("none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset"),
    "system_reboot",
)
_BIT_ERRORS: Final = {220: "effective", 222: "symbol"}
"""Ratios by link: what forward error correction left, and of symbols before it."""
FEC_CORRECTIONS: Final = 16
"""Blocks are counted by how many symbols were mended in them, 0 to 15."""
_FEC: Final = {235 + number: number for number in range(FEC_CORRECTIONS)}

_OF_GPU: Final = (
    (*_ECC, _PCIE_REPLAYS, *_REMAPPED_ROWS, _REMAP_PENDING, _REMAP_FAILED),
    tuple(_PCIE_ERRORS),
    (_RECOVERY_ACTION,),
)
_OF_LINK: Final = (tuple(_BIT_ERRORS), tuple(_FEC))
"""Fields by the generation that brought them."""
_LEARN_EVERY: Final = 20
"""Reads after which everything is asked for again: a new driver may know more."""

_SLOWED_BY: Final = (
    (0x4, "power_cap"),
    (0x8, "hardware"),
    (0x10, "sync_boost"),
    (0x20, "software_thermal"),
    (0x40, "hardware_thermal"),
    (0x80, "power_brake"),
)
"""nvmlClocksEventReason*; being idle and clocks that somebody set are none."""

_Wanted = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """The condition of one GPU; what the GPU or its driver does not tell is empty or None."""

    ecc_errors: tuple[tuple[str, str, int], ...] = ()
    """(`corrected` or `uncorrected`, `volatile` or `aggregate`, count)."""
    remapped_rows: tuple[tuple[str, int], ...] = ()
    """(errors that were the reason, rows of memory that were exchanged for spare ones)."""
    remap_pending: bool | None = None
    """A row waits for a reset of the GPU to be exchanged."""
    remap_failed: bool | None = None
    """A row could not be exchanged: the memory has no spare ones."""
    pcie_errors: tuple[tuple[str, int], ...] = ()
    """(kind, count), replays among them."""
    slowed_by: tuple[str, ...] | None = None
    """What holds its clocks down at this moment."""
    recovery_action: str | None = None
    """What the driver asks for: `none`, `gpu_reset`, `node_reboot`, …"""
    bit_error_ratios: tuple[tuple[int, str, float], ...] = ()
    """(link, kind, errors of one bit or symbol)."""
    fec_blocks: tuple[tuple[int, int, int], ...] = ()
    """(link, symbols mended in a block, blocks)."""


class GpuHealthReader:
    """Reads one GPU's condition; not thread-safe."""

    def __init__(self, session: NvmlSession, gpu: Handle) -> None:
        self._session = session
        self._gpu = gpu
        self._wanted: tuple[_Wanted, ...] = ()
        self._questions = Questions(())
        self._reads = 0
        self._last: tuple[dict[_Wanted, int], tuple[str, ...] | None] | None = None
        self._health = GpuHealth()

    def read(self, links: Sequence[int]) -> GpuHealth:
        """Ask for everything that this GPU tells; `links` are the NVLinks that it has.

        Where nothing has changed the answer is the same object.

        Raises:
            NvmlError: the GPU is lost, or the session is.
        """
        learns = self._reads % _LEARN_EVERY == 0
        values = self._learn(links) if learns else self._ask(self._wanted, self._questions)
        self._reads += 1
        found = values, self._slowed_by()
        if found != self._last:
            self._last = found
            self._health = _health(*found)
        return self._health

    def _learn(self, links: Sequence[int]) -> dict[_Wanted, int]:
        """Ask for all there may be; what has a value is what is asked for from now on."""
        groups = [[(field, 0) for field in fields] for fields in _OF_GPU]
        groups += [[(field, link) for link in links for field in fields] for fields in _OF_LINK]
        found: dict[_Wanted, int] = {}
        for pairs in groups:
            found |= self._ask(pairs, Questions(pairs))
        self._wanted = tuple(found)
        self._questions = Questions(self._wanted)
        return found

    def _ask(self, pairs: Sequence[_Wanted], questions: Questions) -> dict[_Wanted, int]:
        if not pairs:
            return {}
        try:
            told = self._session.field_values(self._gpu, questions).told()
        except NvmlError as error:
            if error.lost:
                raise
            return {}
        return {pair: value for pair, value in zip(pairs, told, strict=True) if value is not None}

    def _slowed_by(self) -> tuple[str, ...] | None:
        try:
            reasons = self._session.clock_event_reasons(self._gpu)
        except NvmlError as error:
            if error.lost:
                raise
            return None
        return tuple(name for bit, name in _SLOWED_BY if reasons & bit)


def bit_error_ratio(packed: int) -> float:
    """The ratio that a packed value of `NVML_FI_DEV_NVLINK_COUNT_*_BER` stands for."""
    # As text, so that 3 and 12 give 3e-12 and no neighbour of it.
    return float(f"{packed >> 8 & 0xF}e-{packed & 0xFF}")


def _health(values: Mapping[_Wanted, int], slowed_by: tuple[str, ...] | None) -> GpuHealth:
    of_gpu = {field: value for (field, scope), value in values.items() if scope == 0}

    def flag(field: int) -> bool | None:
        return None if field not in of_gpu else of_gpu[field] != 0

    replays = (("replay", of_gpu[_PCIE_REPLAYS]),) if _PCIE_REPLAYS in of_gpu else ()
    action = of_gpu.get(_RECOVERY_ACTION)
    return GpuHealth(
        ecc_errors=tuple((*names, of_gpu[field]) for field, names in _ECC.items() if field in of_gpu),
        remapped_rows=tuple((name, of_gpu[field]) for field, name in _REMAPPED_ROWS.items() if field in of_gpu),
        remap_pending=flag(_REMAP_PENDING),
        remap_failed=flag(_REMAP_FAILED),
        pcie_errors=(*replays, *((name, of_gpu[field]) for field, name in _PCIE_ERRORS.items() if field in of_gpu)),
        slowed_by=slowed_by,
        recovery_action=None
        if action is None
        else _RECOVERY_ACTIONS[action]
        if action < len(_RECOVERY_ACTIONS)
        else f"action_{action}",
        bit_error_ratios=tuple(
            (link, _BIT_ERRORS[field], bit_error_ratio(value))
            for (field, link), value in values.items()
            if field in _BIT_ERRORS
        ),
        fec_blocks=tuple((link, _FEC[field], value) for (field, link), value in values.items() if field in _FEC),
    )
