"""A sysfs that others made: the InfiniBand part of node_exporter's fixtures, read where the archive is present.

The archive is prometheus/node_exporter's collector/fixtures/sys.ttar (Apache-2.0).  It is not part of this repository.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.probes.rdma.counters import RdmaCounters
from railscope.probes.rdma.inventory import RdmaPort, read_ports
from tests.unit.netdev_messages import SteppedClock

RECORDED = Path(__file__).parents[3] / "shared/data/node_exporter-sys.ttar"
"""A third party's file, beside the checkout where it is there at all."""


def unpack(archive: str, root: Path) -> None:
    """Unpack the part of a ttar archive that is under sys/class/infiniband: Path, Lines, Directory, SymlinkTo."""
    lines = iter(archive.splitlines())
    file: Path | None = None
    for line in lines:
        key, _, value = line.partition(": ")
        if not value.startswith("sys/class/infiniband") and key in ("Path", "Directory"):
            file = None
        elif key == "Directory":
            (root / value).mkdir(parents=True, exist_ok=True)
        elif key == "Path":
            file = root / value
        elif key == "SymlinkTo" and file is not None:
            file.symlink_to(value)
        elif key == "Lines":
            text = "".join(f"{next(lines)}\n" for _ in range(int(value)))
            if file is not None:
                file.write_text(text)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    if not RECORDED.is_file():
        pytest.skip(f"node_exporter's recorded tree is not at {RECORDED}")
    unpack(RECORDED.read_text(), tmp_path)
    return tmp_path / "sys"


def test_their_ports_are_read_as_node_exporter_reads_them(sysfs: Path) -> None:
    def brief(port: RdmaPort) -> tuple[str, str, int | None]:
        return port.state, port.physical_state, port.rate_bytes_per_second

    found = read_ports(sysfs)
    assert {port.name: brief(port) for port in found} == {
        "i40iw0/1": ("ACTIVE", "LinkUp", 1_250_000_000),
        "mlx4_0/1": ("ACTIVE", "LinkUp", 5_000_000_000),
        "mlx4_0/2": ("ACTIVE", "LinkUp", 5_000_000_000),
    }
    assert [port.firmware for port in found] == ["0.2", "2.31.5050", "2.31.5050"]


def test_their_counters_have_node_exporters_values_and_those_without_support_are_left_out(sysfs: Path) -> None:
    source = RdmaCounters(sysfs, SteppedClock())
    try:
        reading = source.read()
    finally:
        source.close()
    assert reading.shape is not None
    assert reading.failed == ()
    assert reading.names == ("i40iw0/1", "mlx4_0/1", "mlx4_0/2")
    known = reading.shape.known
    assert not known[0].any()  # "N/A (no PMA)" in every file
    values = {
        name: int(reading.values[reading.names.index("mlx4_0/1"), reading.fields.index(name)])
        for name in ("tx_bytes", "rx_bytes", "link_downed", "link_error_recovery", "port_xmit_wait")
    }
    # node_exporter's own expected output for this tree, collector/fixtures/e2e-output.txt.
    assert values == {
        "tx_bytes": 14_933_760,
        "rx_bytes": 18_527_668,
        "link_downed": 0,
        "link_error_recovery": 0,
        "port_xmit_wait": 2**32 - 1,
    }
    wait = reading.names.index("mlx4_0/1"), reading.fields.index("port_xmit_wait")
    assert reading.shape.saturating[wait]  # theirs stands at its end: nobody knows how long it really waited
    assert reading.shape.maxima[wait] == 2**32 - 1
