"""Stand-ins for the driver's NVML and for nvidia-smi, so that a rehearsal goes through what reads them (simulated).

The library is tests/nvml's stub, told of one GPU with eighteen NVLinks; nvidia-smi prints the same GPU and links in the
format of the real one (driver 580).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.nvml.stub import UNSIGNED_LONG_LONG, build_stub, link_lines

LINKS: Final = 18
_UUID: Final = "GPU-00000000-0000-0000-0000-000000000000"
_NAME: Final = "Simulated GPU"
_PCIE_FIELDS: Final = (197, 198)
"""NVML_FI_DEV_PCIE_COUNT_TX_BYTES and …_RX_BYTES."""
_CONDITION_FIELDS: Final = (3, 4, 94, 142, 143, 144, 145, 215, 220, 230, 235)
"""Some of what probes/nvlink/gpu_health.py reads, of the GPU and of its first link."""
_EVENTS: Final = 0xFFFF
_NVIDIA_SMI: Final = f"""#!/bin/sh
# A stand-in (simulated).
case "$*" in
--query-gpu=index,uuid,pci.bus_id,name*) echo '0, {_UUID}, 00000000:1B:00.0, {_NAME}' ;;
--query-gpu=ecc.errors.*) echo '[N/A]' ;;
"nvlink --status")
    echo 'GPU 0: {_NAME} (UUID: {_UUID})'
    for link in $(seq 0 {LINKS - 1}); do printf '\\t Link %d: 26.562 GB/s\\n' "$link"; done
    ;;
*) echo "the stand-in for nvidia-smi knows no $*" >&2; exit 1 ;;
esac
"""


def lay_driver(folder: Path) -> None:
    """Lay libnvidia-ml.so.1, its script and nvidia-smi into a folder.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: gcc failed or is missing.
    """
    build_stub(folder)
    counters = [f"field 0 {field} 0 0 {UNSIGNED_LONG_LONG} 1000" for field in _PCIE_FIELDS]
    condition = [f"field 0 {field} 0 0 {UNSIGNED_LONG_LONG} 0" for field in _CONDITION_FIELDS]
    lines = ["gpus 1", *link_lines(0, range(LINKS)), *counters, *condition, f"events 0 {_EVENTS}", "fabric 0 3 0"]
    (folder / "script").write_text("\n".join(lines) + "\n")
    tool = folder / "nvidia-smi"
    tool.write_text(_NVIDIA_SMI)
    tool.chmod(0o755)
