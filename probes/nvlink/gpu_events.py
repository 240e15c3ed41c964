"""What NVML tells of GPUs by itself: its event sets, which hold XIDs, memory errors and what else a driver reports.

Events are told from registration on; whoever registered earlier, or besides, hears them too.  A driver names the kinds
that a GPU can tell (nvmlDeviceGetSupportedEventTypes), and a virtual GPU or an old driver tells none.  Changes of
clocks and of performance states are left alone: under a power cap there are many a second, and what holds clocks down
is read anyway (gpu_health.py).  The data of an XID is its number (nvml.h, nvmlEventData_t); other kinds have none that
is documented.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from railscope.probes.clock import Clock
from railscope.probes.nvlink.nvml import NvmlError, NvmlSession, number_of_handle

_XID: Final = 0x8
_CODES: Final = {
    0x2: "double_bit_ecc",
    0x200: "single_bit_ecc_storm",
    0x400: "memory_retirement",
    0x800: "memory_retirement_failed",
    0x1000: "poison",
    0x2000: "fatal_poison",
    0x4000: "unavailable",
    0x8000: "recovery_action",
}
"""By nvmlEventType*."""
_WANTED: Final = _XID | sum(_CODES)
_MOST_EVENTS: Final = 256
"""Of one reading: what is left comes with the next."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """What NVML told of one GPU."""

    kind: str
    """`xid`, else `gpu`."""
    code: str
    """The number of an XID, else a word of ours: `double_bit_ecc`, `unavailable`, …"""
    pci: str
    """As sysfs writes it."""
    monotonic_ns: int
    """When it was read."""


class GpuEvents:
    """Events of the GPUs of one session; not thread-safe."""

    def __init__(self, session: NvmlSession, gpus: Iterable[int], clock: Clock) -> None:
        """Register for what each of these GPUs, by number, can tell.

        Raises:
            NvmlError: there are no event sets, or the session is lost.
        """
        self._session = session
        self._clock = clock
        self._addresses: dict[int, str] = {}
        """On PCI, by number of the handle: of a GPU that is lost NVML does not tell it any more."""
        self._set = session.create_event_set()
        self.gpus = tuple(number for number in gpus if self._register(number))
        """Those that tell of events."""

    def _register(self, number: int) -> bool:
        try:
            gpu = self._session.handle(number)
            kinds = self._session.supported_events(gpu) & _WANTED
            if kinds:
                self._addresses[number_of_handle(gpu)] = self._session.pci_address(gpu)
                self._session.register_events(gpu, kinds, self._set)
        except NvmlError as error:
            if error.session_lost:
                raise
            return False
        return bool(kinds)

    def read(self) -> tuple[GpuEvent, ...]:
        """Everything that came since, up to a limit; does not wait.

        Raises:
            NvmlError: a GPU or the session is lost, and all that came before was told: what this object holds is of no
                use any more.
        """
        events: list[GpuEvent] = []
        for _ in range(_MOST_EVENTS):
            try:
                told = self._next()
            except NvmlError:
                if events:
                    break  # the event that tells why may be among them; the next call raises
                raise
            if told is None:
                break
            pci, types, data = told
            now_ns = self._clock.monotonic_ns()
            if types & _XID:
                events.append(GpuEvent("xid", str(data), pci, now_ns))
            events += [GpuEvent("gpu", code, pci, now_ns) for bit, code in _CODES.items() if types & bit]
        return tuple(events)

    def _next(self) -> tuple[str, int, int] | None:
        """PCI address of the GPU, types and data of the oldest event; None: there is none."""
        told = self._session.next_event(self._set)
        if told is None:
            return None
        gpu, types, data = told
        return self._addresses.get(number_of_handle(gpu)) or self._session.pci_address(gpu), types, data

    def close(self) -> None:
        """Give the event set back; errors do not matter any more."""
        self._session.free_event_set(self._set)
