"""What metrics and labels are called in OpenTelemetry.

Where OpenTelemetry's semantic conventions have a name for what is counted, it is that one: `hw.network.*` for rails,
`hw.gpu.io` for the PCIe bytes of GPUs, `hw.temperature` for network modules, `process.*` for the agent, and among the
attributes `k8s.*`, `container.id`, `process.pid` and `network.*`.  All else is in a namespace of its own: the metric
without its unit and `_total`, a dot behind its first word, so that `railscope_comm_inflight_seconds` is
`railscope.comm.inflight` in `s`; and `railscope.LABEL` for labels.  So a server that translates names to Prometheus'
has the same names again.

Sources: https://opentelemetry.io/docs/specs/semconv/hardware/ (network, gpu, temperature), /system/process-metrics/ and
/registry/attributes/ (k8s, container, process, network); units are UCUM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import PREFIX, Metric

Instrument = Literal["counter", "updowncounter", "gauge", "histogram"]

UNITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bytes_per_second": "By/s",
        "seconds": "s",
        "bytes": "By",
        "ratio": "1",
        "celsius": "Cel",
        "watts": "W",
    }
)
"""By the end of a metric's name; the first that fits decides."""

DIRECTION: Final = "network.io.direction"
HW_ID: Final = "hw.id"
ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "container": "k8s.container.name",
        "container_id": "container.id",
        "direction": DIRECTION,
        "namespace": "k8s.namespace.name",
        "netdev": "network.interface.name",
        "pid": "process.pid",
        "pod": "k8s.pod.name",
        "pod_uid": "k8s.pod.uid",
        catalogue.EXPORTED_JOB: "railscope.job",
    }
)
"""Attributes of labels that the conventions have a name for, and of one that Prometheus does not let us call so."""


@dataclass(frozen=True, slots=True)
class OtlpName:
    """A metric as OpenTelemetry has it."""

    name: str
    unit: str
    """UCUM; empty: a count of something."""
    instrument: Instrument
    attributes: Mapping[str, str] = field(default_factory=dict)
    """That every point has, besides those of its labels."""
    hardware: bool = False
    """Its points carry `hw.id` and `hw.name`."""
    by_device: bool = False
    """A device counts it, and has since the boot; all else the agent does."""


def _network(name: str, unit: str, instrument: Instrument, direction: str = "") -> OtlpName:
    attributes = {"hw.type": "network"} | ({DIRECTION: direction} if direction else {})
    return OtlpName(f"hw.network.{name}", unit, instrument, attributes, hardware=True, by_device=True)


_CONVENTIONS: Final[Mapping[str, OtlpName]] = MappingProxyType(
    {
        catalogue.RAIL_TRANSMIT_BYTES.name: _network("io", "By", "counter", "transmit"),
        catalogue.RAIL_RECEIVE_BYTES.name: _network("io", "By", "counter", "receive"),
        catalogue.RAIL_UP.name: _network("up", "1", "updowncounter"),
        catalogue.RAIL_SPEED.name: _network("bandwidth.limit", "By/s", "updowncounter"),
        catalogue.RAIL_UTILIZATION.name: _network("bandwidth.utilization", "1", "gauge"),
        catalogue.RAIL_MODULE_TEMPERATURE.name: OtlpName(
            "hw.temperature", "Cel", "gauge", {"hw.type": "temperature", "hw.sensor_location": "module"}, hardware=True
        ),
        catalogue.GPU_PCIE_TRANSMIT_BYTES.name: OtlpName(
            "hw.gpu.io", "By", "counter", {"hw.type": "gpu", DIRECTION: "transmit"}, hardware=True, by_device=True
        ),
        catalogue.GPU_PCIE_RECEIVE_BYTES.name: OtlpName(
            "hw.gpu.io", "By", "counter", {"hw.type": "gpu", DIRECTION: "receive"}, hardware=True, by_device=True
        ),
        catalogue.PROCESS_CPU.name: OtlpName("process.cpu.time", "s", "counter"),
        catalogue.PROCESS_RESIDENT.name: OtlpName("process.memory.usage", "By", "updowncounter"),
        catalogue.PROCESS_VIRTUAL.name: OtlpName("process.memory.virtual", "By", "updowncounter"),
        catalogue.PROCESS_OPEN_FDS.name: OtlpName(
            "process.unix.file_descriptor.count", "{file_descriptor}", "updowncounter"
        ),
    }
)


_BY_DEVICES: Final = frozenset(
    metric.name
    for metric in (
        *(catalogue.RAIL_COUNTER, catalogue.RAIL_FEC_BLOCKS, catalogue.RAIL_FEC_CORRECTED),
        *(catalogue.RAIL_QUEUE_DROPS, catalogue.RAIL_QUEUE_OVERLIMITS, catalogue.RAIL_QUEUE_REQUEUES),
        *(catalogue.NVLINK_TRANSMIT_BYTES, catalogue.NVLINK_RECEIVE_BYTES, catalogue.NVLINK_ERRORS),
        *(catalogue.NVLINK_FEC_BLOCKS, catalogue.GPU_NVLINK_TRANSMIT_BYTES, catalogue.GPU_NVLINK_RECEIVE_BYTES),
        *(catalogue.GPU_NVLINK_ERRORS, catalogue.GPU_ECC_ERRORS, catalogue.GPU_PCIE_ERRORS, catalogue.PCIE_ERRORS),
    )
)


def otlp_name(metric: Metric) -> OtlpName:
    """What a metric is called."""
    known = _CONVENTIONS.get(metric.name)
    if known is not None:
        return known
    name = metric.name.removeprefix(PREFIX).removesuffix("_total")
    end = next((end for end in UNITS if name.endswith(f"_{end}")), "")
    name = name.removesuffix(f"_{end}") if end else name
    return OtlpName(
        f"railscope.{name.replace('_', '.', 1)}", UNITS.get(end, ""), metric.kind, by_device=metric.name in _BY_DEVICES
    )


def attribute_name(label: str) -> str:
    """What a label is called."""
    return ATTRIBUTES.get(label, f"railscope.{label}")
