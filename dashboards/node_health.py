"""Panels of the dashboard *Node* on the condition of its hardware: what breaks, seen before it hurts."""

from __future__ import annotations

from railscope.agent.facts import catalogue
from railscope.dashboards.panels import NEVER_FINE, NONE_REPORTED, RAIL, AnyPanel, query, table, timeseries
from railscope.dashboards.variables import HOST
from railscope.dashboards.variables import RAIL as CHOSEN

_GPU = "{{instance}} GPU {{gpu}}"
_RAIL = RAIL + " {{instance}}"
_PCI = "{{instance}} {{device}} {{pci}}"
_LINK = _GPU + " link {{link}}"


def _increase(metric: str, chosen: str = HOST) -> str:
    return f"increase({metric}{{{chosen}}}[$__rate_interval])"


def gpu_panels() -> list[AnyPanel]:
    """Of GPUs and their NVLink fabric."""
    return [
        table(
            "NVLink fabric",
            "The NVLink fabric that each GPU belongs to; GPUs of one clique reach each other.",
            "instance gpu state fabric_cluster clique",
            catalogue.GPU_FABRIC_INFO.where(HOST),
        ),
        timeseries(
            "Fabric registration and health mask",
            "NVML's return code of each GPU's registration with its NVLink fabric (0: it succeeded), and the health "
            "mask as NVML shows it.",
            "none",
            query(catalogue.GPU_FABRIC_ERROR.where(HOST), _GPU + " registration"),
            query(catalogue.GPU_FABRIC_HEALTH_MASK.where(HOST), _GPU + " health mask"),
        ),
        timeseries(
            "ECC errors of GPUs",
            "Increase of ECC errors: volatile since the driver was loaded, aggregate in the GPU's life.",
            "short",
            query(f"topk(20, {_increase(catalogue.GPU_ECC_ERRORS.name)})", _GPU + " {{kind}} {{since}}"),
            thresholds=NEVER_FINE,
        ).no_value(NONE_REPORTED),
        timeseries(
            "Remapped memory rows",
            "Rows of memory that were exchanged for spare ones; pending: one waits for a reset; failed: one could not "
            "be.",
            "short",
            query(catalogue.GPU_REMAPPED_ROWS.where(HOST), _GPU + " {{kind}}"),
            query(f"{catalogue.GPU_ROW_REMAP_PENDING.where(HOST)} == 1", _GPU + " pending"),
            query(f"{catalogue.GPU_ROW_REMAP_FAILED.where(HOST)} == 1", _GPU + " failed"),
        ).no_value(NONE_REPORTED),
        timeseries(
            "PCIe errors of GPUs",
            "Increase of PCIe errors and replays, as counted by each GPU.",
            "short",
            query(f"topk(20, {_increase(catalogue.GPU_PCIE_ERRORS.name)})", _GPU + " {{kind}}"),
        ).no_value(NONE_REPORTED),
        timeseries(
            "Reasons that lower GPU clocks",
            "1 while this holds a GPU's clocks down.",
            "short",
            query(catalogue.GPU_SLOWED.where(HOST), _GPU + " {{reason}}"),
        ).no_value(NONE_REPORTED),
        table(
            "Recovery actions",
            "What the driver asks for to recover a GPU.",
            "instance gpu action",
            f"{catalogue.GPU_RECOVERY_ACTION.where(HOST)} == 1",
            empty=NONE_REPORTED,
        ),
        timeseries(
            "Bit error ratio of NVLinks",
            "Bit error ratio of each NVLink that has one: effective, what forward error correction left; symbol, "
            "before it.",
            "sci",
            query(catalogue.NVLINK_BIT_ERROR_RATIO.where(HOST), _LINK + " {{kind}}"),
        ).no_value(NONE_REPORTED),
        timeseries(
            "Error correction of NVLinks",
            "Blocks of each link in which forward error correction mended many symbols, by how many (8 to 15; all with "
            "--series.detail=nvlinks). 15 leaves no reserve.",
            "short",
            query(f"topk(20, {_increase(catalogue.NVLINK_FEC_BLOCKS.name)})", _LINK + " {{corrected}} symbols"),
        ).no_value(NONE_REPORTED),
    ]


def link_panels() -> list[AnyPanel]:
    """Of rails' links, their modules and PCIe, and of the kernel's log."""
    return [
        table(
            "Hardware events",
            "XIDs, PCIe errors and complaints of network drivers in the kernel's log since boot, and what NVML told.",
            "instance kind code pci severity",
            catalogue.HARDWARE_EVENTS.where(HOST),
            value="events",
            empty=NONE_REPORTED,
        ),
        timeseries(
            "Age of hardware events",
            "How long ago there was such an event last.",
            "s",
            query(
                f"time() - {catalogue.HARDWARE_EVENT_TIMESTAMP.where(HOST)}",
                "{{instance}} {{kind}} {{code}} {{pci}}",
            ),
        ).no_value(NONE_REPORTED),
        table(
            "Firmware and boards",
            "Firmware and board of the RDMA devices of rails.",
            "instance rail device port firmware board",
            catalogue.RAIL_HARDWARE_INFO.where(CHOSEN),
        ),
        table(
            "Switches",
            "The switch and its port at the other end of each rail's cable, as the switch says itself (LLDP).",
            "instance rail device switch switch_port",
            catalogue.RAIL_SWITCH_INFO.where(CHOSEN),
            empty="no switch is heard",
        ),
        timeseries(
            "Queue pairs",
            "Queue pairs of processes on RDMA devices: connected, not connected, failed.",
            "short",
            query(
                f"sum by (cluster, instance, device, state) ({catalogue.RDMA_QUEUE_PAIRS.where(HOST)})",
                "{{instance}} {{device}} {{state}}",
            ),
        ).no_value("no queue pairs"),
        table(
            "Physical states other than LinkUp",
            "Physical state of RDMA ports that is not LinkUp.",
            "instance rail device port state",
            f"{catalogue.RAIL_PHYSICAL_STATE.where(CHOSEN)} == 1",
            empty=NONE_REPORTED,
        ),
        timeseries(
            "Degraded PCIe links",
            "Lanes and speed of PCIe links against what both ends can; an idle GPU lowers its speed.",
            "percentunit",
            query(catalogue.PCIE_LINK_RATIO.where(HOST), "{{instance}} {{device}} {{of}}"),
        ).no_value(NONE_REPORTED),
        timeseries(
            "PCIe errors",
            "Increase of PCIe errors (AER), by the function that counts them.",
            "short",
            query(f"topk(20, {_increase(catalogue.PCIE_ERRORS.name)})", _PCI + " {{severity}} {{error}}"),
        ).no_value(NONE_REPORTED),
        timeseries(
            "Module temperature",
            "Temperature of each port's module.",
            "celsius",
            query(catalogue.RAIL_MODULE_TEMPERATURE.where(CHOSEN), _RAIL),
        ),
        timeseries(
            "Optical power of modules",
            "Optical power of the weakest lane of each port's module.",
            "watt",
            query(catalogue.RAIL_MODULE_POWER.where(CHOSEN), _RAIL + " {{direction}}"),
        ),
        table(
            "Module alarms",
            "Limits of their own that modules passed since the last reading.",
            "instance rail device lane alarm",
            f"{catalogue.RAIL_MODULE_ALARM.where(CHOSEN)} == 1",
            empty=NONE_REPORTED,
        ),
        timeseries(
            "Error correction of ports",
            "Blocks that forward error correction mended or could not, and by how many symbols it mended.",
            "short",
            query(f"topk(20, {_increase(catalogue.RAIL_FEC_BLOCKS.name, CHOSEN)})", _RAIL + " {{result}}"),
            query(
                f"topk(20, {_increase(catalogue.RAIL_FEC_CORRECTED.name, CHOSEN)})",
                _RAIL + " {{fewest}} to {{most}} symbols",
            ),
        ).no_value(NONE_REPORTED),
    ]
