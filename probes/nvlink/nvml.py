"""A session with NVML, the driver's management library, through nvidia-ml-py.

The library comes with the NVIDIA driver, the Python bindings with `railscope[nvlink]`; either may be missing.  The
bindings are imported only where the library is there, so that a host without GPUs does not pay for them (1.6 MB).

Every function may block for as long as the driver likes: call from a thread that nothing waits for.  NVML itself is
thread-safe.  While a session is open the driver's modules cannot be unloaded, as with every user of NVML.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt

from railscope.probes.installation import remedy_for_missing_extra

LIBRARY: Final = "libnvidia-ml.so.1"
"""Found as every library is: ld.so.cache, LD_LIBRARY_PATH."""

SUCCESS: Final = 0
_UNINITIALIZED: Final = 1
_INVALID_ARGUMENT: Final = 2
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_NOT_FOUND: Final = 6
_DRIVER_NOT_LOADED: Final = 9
_TIMEOUT: Final = 10
_FUNCTION_NOT_FOUND: Final = 13
_GPU_IS_LOST: Final = 15
_VERSION_MISMATCH: Final = 18
_ARGUMENT_VERSION_MISMATCH: Final = 25
_GPU_NOT_FOUND: Final = 28

_ABSENT: Final = frozenset(
    (
        _INVALID_ARGUMENT,
        _NOT_SUPPORTED,
        _NO_PERMISSION,
        _NOT_FOUND,
        _FUNCTION_NOT_FOUND,
        _ARGUMENT_VERSION_MISMATCH,
    )
)
_SESSION_LOST: Final = frozenset((_UNINITIALIZED, _DRIVER_NOT_LOADED, _VERSION_MISMATCH))
_GPU_LOST: Final = frozenset((_GPU_IS_LOST, _GPU_NOT_FOUND))

_NO_GPUS: Final = 1
"""NVML_INIT_FLAG_NO_GPUS: a host without a GPU is no error."""

_FIELD_VALUE: Final = np.dtype(
    [
        ("field", "<u4"),
        ("scope", "<u4"),
        ("time_us", "<i8"),
        ("latency_us", "<i8"),
        ("kind", "<u4"),
        ("code", "<u4"),
        ("value", "<u8"),
    ]
)
"""nvmlFieldValue_t."""
_VALUE_BITS: Final = {1: 32, 2: 64, 3: 64, 6: 16}
"""Unsigned integers by nvmlValueType_t; no field that is read here has another type."""
_MASKS: Final = np.array([(1 << _VALUE_BITS.get(kind, 0)) - 1 for kind in range(256)], dtype=np.uint64)

_UNSIGNED_LONG_LONG: Final = 3

ALL_LINKS: Final = 0xFFFF_FFFF
"""The scope that sums a throughput counter over a GPU's links."""

Handle = Any
"""NVML's pointer to a device; valid while the session is open."""


class NvmlMissing(Exception):
    """The driver's library or its Python bindings are not installed; the message is one line, `remedy` another."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class NvmlError(Exception):
    """NVML refused: one line in its words."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.code = code

    @property
    def absent(self) -> bool:
        """The driver, the GPU or our rights do not provide this; everything else may still work."""
        return self.code in _ABSENT

    @property
    def gpu_lost(self) -> bool:
        """The GPU fell off the bus, or was taken away."""
        return self.code in _GPU_LOST

    @property
    def session_lost(self) -> bool:
        """The driver was unloaded or exchanged: only another session can help."""
        return self.code in _SESSION_LOST

    @property
    def lost(self) -> bool:
        """The handle is unusable from now on."""
        return self.gpu_lost or self.session_lost


class Questions:
    """(field, scope) pairs that one GPU is asked for in one call, again and again; an NVLink's scope is its number.

    NVML writes its answers into the array of the questions, which is kept here: for one caller at a time.
    """

    __slots__ = ("_asked", "_room", "address", "length")

    def __init__(self, wanted: Sequence[tuple[int, int]]) -> None:
        pairs = np.array(wanted, np.uint32).reshape(-1, 2)
        self._asked = np.zeros(len(pairs), _FIELD_VALUE)
        self._asked["field"], self._asked["scope"] = pairs[:, 0], pairs[:, 1]
        self._room = self._asked.copy()
        self.address = ctypes.c_void_p(self._room.ctypes.data)
        self.length = ctypes.c_int(len(pairs))

    def reset(self) -> None:
        """Forget the answers."""
        self._room[:] = self._asked

    def answers(self) -> FieldValues:
        """What NVML has written."""
        masks = _MASKS.take(self._room["kind"], mode="clip")
        codes = self._room["code"].copy()
        codes[(codes == SUCCESS) & (masks == 0)] = _NOT_SUPPORTED
        values = self._room["value"] & masks
        values[codes != SUCCESS] = 0
        return FieldValues(codes, values, masks == _MASKS[_UNSIGNED_LONG_LONG])


@dataclass(frozen=True, slots=True, eq=False)
class FieldValues:
    """Values that were asked for in one call, in the order of the questions; each has its own success."""

    codes: npt.NDArray[np.uint32]
    """nvmlReturn_t; a value that is no unsigned integer counts as not supported."""
    values: npt.NDArray[np.uint64]
    """0 where the code is not SUCCESS: there is none."""
    wide: npt.NDArray[np.bool_]
    """Whether the value has 64 bits, so that a counter of bytes does not wrap between two readings."""

    def told(self) -> list[int | None]:
        """The values one by one; None: this has no value now."""
        values: list[int | None] = self.values.tolist()
        for place in self.codes.nonzero()[0].tolist():
            values[place] = None
        return values

    def part(self, first: int, end: int | None = None) -> FieldValues:
        """Some of them, by place."""
        return FieldValues(self.codes[first:end], self.values[first:end], self.wide[first:end])


@dataclass(frozen=True, slots=True)
class Fabric:
    """Whether the GPU has joined the NVLink fabric of its NVSwitches (nvmlGpuFabricInfoV_t)."""

    state: str
    """`not_supported`, `not_started`, `in_progress`, `completed`, or `unknown`."""
    error: int
    """nvmlReturn_t of the registration; means something in state `completed` only."""
    unhealthy: tuple[str, ...]
    """What the health mask complains of: degraded_bandwidth, insufficient_nvlinks, …, and `registration_failed` where
    the fabric refused the GPU."""
    health_mask: int
    """As NVML shows it; 0: nothing in it is supported."""
    cluster: str
    """UUID of the fabric's cluster; empty while the GPU has joined none."""
    clique: int
    """GPUs of one clique reach each other."""


_FABRIC_STATES: Final = ("not_supported", "not_started", "in_progress", "completed")
_FABRIC_HEALTH: Final = (
    ("degraded_bandwidth", 0, 1),
    ("route_recovery", 2, 1),
    ("route_unhealthy", 4, 1),
    ("access_timeout_recovery", 6, 1),
    ("partition_not_assigned", 12, 2),
    ("fabric_manager_disconnected", 14, 2),
)
"""Name, shift of two bits, and which of their values is bad: 0 not supported, 1 true, 2 false
(nvml.h, `NVML_GPU_FABRIC_HEALTH_MASK_*`)."""
_CONFIGURATION_SHIFT: Final = 8
_CONFIGURATION_SOUND: Final = 1
_CONFIGURATION: Final = {
    2: "incorrect_system_guid",
    3: "incorrect_chassis_serial",
    4: "no_partition",
    5: "insufficient_nvlinks",
    6: "incompatible_gpu_firmware",
    7: "invalid_location",
    8: "gpu_state_invalid",
}
"""Four bits: `NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*`."""


class NvmlSession:
    """An initialised NVML.  Every method raises NvmlError."""

    def __init__(self, bindings: Any, library: ctypes.CDLL) -> None:
        """nvidia-ml-py, and the same library that it uses."""
        self._nvml = bindings
        self._library = library
        self._closed = False
        self._words: dict[int, str] = {}
        """NVML's, by return code."""

    @classmethod
    def open(cls, library: str = LIBRARY) -> NvmlSession:
        """Load and initialise; `library` is a name for the dynamic loader or a path with the same soname.

        Raises:
            NvmlMissing: there is no such library, or nvidia-ml-py is not installed.
            NvmlError: the driver does not answer, or has another version than the library.
        """
        try:
            loaded = ctypes.CDLL(library)  # the bindings find it by its soname
        except OSError as error:
            what = f"{library} cannot be loaded"
            if "No such file" not in str(error):
                what = " ".join(str(error).split())
            remedy = "install the NVIDIA driver, or give the container its libraries (capability utility)"
            raise NvmlMissing(what, remedy) from None
        try:
            import pynvml
        except ImportError:
            remedy = remedy_for_missing_extra("nvlink")
            raise NvmlMissing("the NVIDIA driver's library is installed, nvidia-ml-py is not", remedy) from None
        session = cls(pynvml, loaded)
        session._call("nvmlInitWithFlags", _NO_GPUS)
        return session

    def close(self) -> None:
        """End the session; handles are invalid from then on.  Errors do not matter any more."""
        if not self._closed:
            self._closed = True
            try:
                self._call("nvmlShutdown")
            except NvmlError:
                return

    def driver_version(self) -> str:
        return str(self._call("nvmlSystemGetDriverVersion"))

    def gpu_count(self) -> int:
        """GPUs that NVML shows to this process, whole ones: the slices of a MIG GPU are not counted."""
        return int(self._call("nvmlDeviceGetCount"))

    def handle(self, index: int) -> Handle:
        return self._call("nvmlDeviceGetHandleByIndex", index)

    def name(self, gpu: Handle) -> str:
        return str(self._call("nvmlDeviceGetName", gpu))

    def uuid(self, gpu: Handle) -> str:
        return str(self._call("nvmlDeviceGetUUID", gpu))

    def pci_address(self, gpu: Handle) -> str:
        """As sysfs writes it: 0000:1b:00.0."""
        return _sysfs_address(self._call("nvmlDeviceGetPciInfo", gpu))

    def link_state(self, gpu: Handle, link: int) -> int:
        """0 inactive, 1 active, 2 asleep."""
        state = ctypes.c_uint()
        self._ask("nvmlDeviceGetNvLinkState", gpu, ctypes.c_uint(link), ctypes.byref(state))
        return state.value

    def remote_pci_address(self, gpu: Handle, link: int) -> str:
        """Of the GPU or NVSwitch at the other end, as sysfs writes it."""
        return _sysfs_address(self._call("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link))

    def remote_device_type(self, gpu: Handle, link: int) -> int:
        """nvmlIntNvLinkDeviceType_t: 0 GPU, 1 IBM NPU, 2 switch, 255 unknown."""
        return int(self._call("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link))

    def fabric(self, gpu: Handle) -> Fabric:
        def ask(gpu: Handle) -> Any:
            info = self._nvml.c_nvmlGpuFabricInfo_v2_t()
            self._nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
            return info

        info = self._guarded("nvmlDeviceGetGpuFabricInfoV", ask, gpu)
        state = _FABRIC_STATES[info.state] if info.state < len(_FABRIC_STATES) else "unknown"
        error = int(info.status)
        refused = ("registration_failed",) if state == "completed" and error != SUCCESS else ()
        mask = int(info.healthMask)
        cluster = bytes(info.clusterUuid)
        return Fabric(
            state,
            error,
            (*fabric_complaints(mask), *refused),
            mask,
            str(UUID(bytes=cluster)) if any(cluster) else "",
            int(info.cliqueId),
        )

    def clock_event_reasons(self, gpu: Handle) -> int:
        """What holds the clocks of the GPU down: nvmlClocksEventReason*, as a mask."""
        reasons = ctypes.c_ulonglong()
        try:
            self._ask("nvmlDeviceGetCurrentClocksEventReasons", gpu, ctypes.byref(reasons))
        except NvmlError as error:
            if error.code != _FUNCTION_NOT_FOUND:
                raise
            # Its name in drivers before 535.
            self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, ctypes.byref(reasons))
        return reasons.value

    def create_event_set(self) -> Any:
        return self._call("nvmlEventSetCreate")

    def free_event_set(self, events: Any) -> None:
        """Errors do not matter any more."""
        with contextlib.suppress(NvmlError):
            self._call("nvmlEventSetFree", events)

    def supported_events(self, gpu: Handle) -> int:
        """What the GPU can tell of: nvmlEventType*, as a mask."""
        return int(self._call("nvmlDeviceGetSupportedEventTypes", gpu))

    def register_events(self, gpu: Handle, types: int, events: Any) -> None:
        """Let an event set hold events of these types from now on."""
        self._call("nvmlDeviceRegisterEvents", gpu, types, events)

    def next_event(self, events: Any) -> tuple[Handle, int, int] | None:
        """The GPU, types and data of the oldest event; None: there is none."""
        try:
            told = self._call("nvmlEventSetWait_v2", events, 0)
        except NvmlError as error:
            if error.code == _TIMEOUT:
                return None
            raise
        return told.device, int(told.eventType), int(told.eventData)

    def field_values(self, gpu: Handle, questions: Questions) -> FieldValues:
        """What NVML answers to all of the questions, in one call."""
        # The bindings go through the array in Python, field by field, which takes longer than all else.
        questions.reset()
        self._ask("nvmlDeviceGetFieldValues", gpu, questions.length, questions.address)
        return questions.answers()

    def _ask(self, function: str, *arguments: object) -> None:
        """Call the library itself: for what is asked so often that the bindings' own steps would count."""
        try:
            ask = getattr(self._library, function)
        except AttributeError:  # an old driver
            raise NvmlError(function, _FUNCTION_NOT_FOUND, self.error_text(_FUNCTION_NOT_FOUND)) from None
        code = ask(*arguments)
        if code:
            raise NvmlError(function, code, self.error_text(code))

    def error_text(self, code: int) -> str:
        """NVML's words for a return code."""
        words = self._words.get(code)
        if words is None:
            words = self._words[code] = str(self._nvml.NVMLError(code))
        return words

    def _call(self, function: str, *arguments: object) -> Any:
        return self._guarded(function, getattr(self._nvml, function), *arguments)

    def _guarded(self, function: str, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlError(function, error.value, str(error)) from None


def number_of_handle(gpu: Handle) -> int:
    """By which handles of the same GPU in one session are known to be equal."""
    return ctypes.cast(gpu, ctypes.c_void_p).value or 0


def fabric_complaints(mask: int) -> tuple[str, ...]:
    """What a health mask of the NVLink fabric complains of, by name."""
    found = [name for name, shift, bad in _FABRIC_HEALTH if mask >> shift & 3 == bad]
    configuration = mask >> _CONFIGURATION_SHIFT & 0xF
    if configuration > _CONFIGURATION_SOUND:
        found.append(_CONFIGURATION.get(configuration, f"incorrect_configuration_{configuration}"))
    return tuple(found)


def _sysfs_address(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
