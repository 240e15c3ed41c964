"""The width of each RDMA counter, and whether it saturates or wraps there.

The counters in `counters/` are those of InfiniBand's performance management.  The narrow ones stop at their maximum
(InfiniBand Architecture, PortCounters; widths as in Linux drivers/infiniband/core/sysfs.c), so one that shows its
maximum says "at least this many".  What is in `hw_counters/` is a driver's own: 64 bits, or 32 bits that begin again
in mlx5 (drivers/infiniband/hw/mlx5/counters.c, whose queue counters are fields of 32 bits in the device's answer).
Some of it is no counter but a value of now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COUNTERS: Final = "counters"
HW_COUNTERS: Final = "hw_counters"
"""The two folders of a port."""

MLX5_DRIVER: Final = "mlx5_core"
VPORT_PREFIX: Final = "vport_"
"""mlx5 puts it before counters of a virtual port while its embedded switch is in switchdev mode."""


@dataclass(frozen=True, slots=True)
class Width:
    """The end of one counter."""

    bits: int
    saturates: bool
    """Stops there; otherwise it begins again at 0."""
    gauge: bool = False
    """It rises and falls: a value of now."""

    @property
    def maximum(self) -> int:
        return (1 << self.bits) - 1


WIDE: Final = Width(64, False)
_WRAPS_AT_32: Final = Width(32, False)
_GAUGE: Final = Width(64, False, gauge=True)

_SATURATING_BITS: Final = {
    "symbol_error": 16,
    "port_rcv_errors": 16,
    "port_rcv_remote_physical_errors": 16,
    "port_rcv_switch_relay_errors": 16,
    "port_xmit_discards": 16,
    "VL15_dropped": 16,
    "link_error_recovery": 8,
    "link_downed": 8,
    "port_xmit_constraint_errors": 8,
    "port_rcv_constraint_errors": 8,
    "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4,
    "port_xmit_wait": 32,
}

_MLX5_NARROW: Final = frozenset(
    {
        "rx_write_requests",
        "rx_read_requests",
        "rx_atomic_requests",
        "rx_dct_connect",
        "out_of_buffer",
        "out_of_sequence",
        "duplicate_request",
        "rnr_nak_retry_err",
        "packet_seq_err",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "resp_local_length_error",
        "resp_cqe_error",
        "req_cqe_error",
        "req_remote_invalid_request",
        "req_remote_access_errors",
        "resp_remote_access_errors",
        "resp_cqe_flush_error",
        "req_cqe_flush_error",
        "req_transport_retries_exceeded",
        "req_rnr_retries_exceeded",
        "roce_adp_retrans",
        "roce_adp_retrans_to",
        "roce_slow_restart",
        "roce_slow_restart_cnps",
        "roce_slow_restart_trans",
    }
)


GAUGES: Final = frozenset({"db_fifo_register", "current_rate", "num_qps_congested", "num_qps_recovered"})
"""Values of now in `hw_counters`: a register of bnxt_re (hw_counters.c), and of mana_ib (counters.c) what its
congestion control does at present."""


def width_of(driver: str, group: str, name: str) -> Width:
    """How many bits an RDMA counter has; what is not known is taken to be wide, as it is in every other driver.

    `driver` is the PCI driver's name, `group` the folder that the counter is in.
    """
    if group == COUNTERS:
        bits = _SATURATING_BITS.get(name)
        return WIDE if bits is None else Width(bits, True)
    if name in GAUGES:
        return _GAUGE
    if driver == MLX5_DRIVER and name.removeprefix(VPORT_PREFIX) in _MLX5_NARROW:
        return _WRAPS_AT_32
    return WIDE
