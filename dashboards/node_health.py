"""Panels of the dashboard *Node* on the condition of its hardware: what breaks, seen before it hurts."""

from __future__ import annotations

from railscope.agent.facts import catalogue
from railscope.dashboards.panels import NEVER_FINE, AnyPanel, query, table, timeseries
from railscope.dashboards.variables import HOST

_GPU = "{{instance}} GPU {{gpu}}"
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
            "Registration with the fabric, and its health mask",
            "NVML's return code of each GPU's registration with its NVLink fabric (0: it succeeded), and the health "
            "mask as NVML shows it.",
            "none",
            query(catalogue.GPU_FABRIC_ERROR.where(HOST), _GPU + " registration"),
            query(catalogue.GPU_FABRIC_HEALTH_MASK.where(HOST), _GPU + " health mask"),
        ),
        timeseries(
            "Memory errors of GPUs",
            "Increase of ECC errors: volatile since the driver was loaded, aggregate in the GPU's life.",
            "short",
            query(f"{_increase(catalogue.GPU_ECC_ERRORS.name)} > 0", _GPU + " {{kind}} {{since}}"),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Remapped rows of memory",
            "Rows of memory that were exchanged for spare ones; pending: one waits for a reset; failed: one could not "
            "be.",
            "short",
            query(catalogue.GPU_REMAPPED_ROWS.where(HOST), _GPU + " {{kind}}"),
            query(f"{catalogue.GPU_ROW_REMAP_PENDING.where(HOST)} == 1", _GPU + " pending"),
            query(f"{catalogue.GPU_ROW_REMAP_FAILED.where(HOST)} == 1", _GPU + " failed"),
        ),
        timeseries(
            "PCIe errors of GPUs",
            "Increase of PCIe errors and replays, as counted by each GPU.",
            "short",
            query(f"{_increase(catalogue.GPU_PCIE_ERRORS.name)} > 0", _GPU + " {{kind}}"),
        ),
        timeseries(
            "What slows GPUs",
            "1 while this holds a GPU's clocks down.",
            "short",
            query(catalogue.GPU_SLOWED.where(HOST), _GPU + " {{reason}}"),
        ),
        table(
            "Recovery that the driver asks for",
            "What the driver asks for to recover a GPU.",
            "instance gpu action",
            f"{catalogue.GPU_RECOVERY_ACTION.where(HOST)} == 1",
        ),
        timeseries(
            "Bit errors of NVLinks",
            "Bit error ratio of each NVLink that has one: effective, what forward error correction left; symbol, "
            "before it.",
            "sci",
            query(catalogue.NVLINK_BIT_ERROR_RATIO.where(HOST), _LINK + " {{kind}}"),
        ),
        timeseries(
            "Blocks that NVLinks' error correction mended",
            "Blocks of each link in which forward error correction mended many symbols, by how many (8 to 15; all with "
            "--series.detail=nvlinks). 15 leaves no reserve.",
            "short",
            query(f"topk(20, {_increase(catalogue.NVLINK_FEC_BLOCKS.name)} > 0)", _LINK + " {{corrected}} symbols"),
        ),
    ]
