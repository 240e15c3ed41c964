"""A typical node to reckon with: 8 GPUs with 18 NVLinks each, 8 RoCE rails, 64 communicators.

Simulated: which series there are is what the agent makes of such a node (tests compare each kind with what the real
agent shows); the values stand for nothing.  Every one of 8 processes has 8 communicators, as data, tensor, pipeline,
expert and context parallelism make them.  A RoCE port is two rails with the same number, its RDMA device and its
network device; InfiniBand has less, as its network device is seldom up.  Which counters have counted something is
that of a busy and healthy RoCE network that marks and pauses and now and then loses a packet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.hardware import GpuFacts, NodeGpus, NvlinkFacts
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.rail_ledger import DirectionLedger, Origin, RailLedger
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.agent.facts.snapshot import (
    AgentHealth,
    AttachedProbe,
    CollectiveTotal,
    CollectorResult,
    CommunicatorFacts,
    CompletedTotal,
    LaunchTotal,
    LoopFacts,
    NodeCollectives,
    NodeCompletion,
    NodeIdentity,
    NodeStalls,
    NodeTimes,
    OpHistogram,
    OwnProcessFacts,
    ProbeHealth,
    ProbeLevel,
    RailFacts,
    RailQueue,
    RailTcp,
    RankArrivals,
    RankTimes,
    Snapshot,
    StallTotal,
)
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.node.collectives.kernel_readings import ENQUEUE_BOUNDS
from railscope.agent.node.collectives.node_totals import SIZE_BOUNDS
from railscope.agent.node.completion.completion import BANDWIDTH_BOUNDS, DURATION_BOUNDS
from railscope.agent.node.rails.counter_rules import rule_of
from railscope.agent.node.rails.ethernet_rules import statistic_rule
from railscope.agent.node.rails.netdev_facts import SEVERITIES
from railscope.agent.node.sampling.totals import RATE_BOUNDS

GPUS: Final = 8
COMMUNICATORS_OF_A_GPU: Final = 8
NVLINKS_OF_A_GPU: Final = 18
RDMA_COUNTERS: Final = tuple(
    (
        "VL15_dropped excessive_buffer_overrun_errors link_downed link_error_recovery local_link_integrity_errors "
        "multicast_rcv_packets multicast_xmit_packets port_rcv_constraint_errors port_rcv_errors port_rcv_packets "
        "port_rcv_remote_physical_errors port_rcv_switch_relay_errors port_xmit_constraint_errors port_xmit_discards "
        "port_xmit_packets port_xmit_wait symbol_error unicast_rcv_packets unicast_xmit_packets duplicate_request "
        "implied_nak_seq_err local_ack_timeout_err np_cnp_sent np_ecn_marked_roce_packets out_of_buffer "
        "out_of_sequence packet_seq_err req_rnr_retries_exceeded req_transport_retries_exceeded rnr_nak_retry_err "
        "roce_adp_retrans roce_slow_restart rp_cnp_handled rp_cnp_ignored rx_icrc_encapsulated rx_read_requests "
        "rx_write_requests"
    ).split()
)
"""Of an mlx5 port, counters and hw_counters, without its bytes."""
LINK_COUNTERS: Final = tuple(
    "rx_packets tx_packets rx_errors tx_errors rx_dropped tx_dropped rx_crc_errors rx_missed_errors tx_carrier_errors "
    "carrier_changes".split()
)
"""Of every network device."""
DRIVER_COUNTERS: Final = tuple(
    (
        "link_down_events_phy rx_out_of_buffer rx_vport_rdma_unicast_packets rx_vport_rdma_unicast_bytes "
        "tx_vport_rdma_unicast_packets tx_vport_rdma_unicast_bytes rx_vport_rdma_multicast_packets "
        "rx_vport_rdma_multicast_bytes tx_vport_rdma_multicast_packets tx_vport_rdma_multicast_bytes rx_crc_errors_phy "
        "tx_bytes_phy rx_bytes_phy rx_in_range_len_errors_phy rx_out_of_range_len_phy rx_oversize_pkts_phy "
        "rx_symbol_err_phy rx_unsupported_op_phy rx_pause_ctrl_phy tx_pause_ctrl_phy rx_discards_phy tx_discards_phy "
        "tx_errors_phy rx_undersize_pkts_phy rx_fragments_phy rx_jabbers_phy rx_pcs_symbol_err_phy "
        "rx_corrected_bits_phy rx_pci_signal_integrity tx_pci_signal_integrity outbound_pci_stalled_rd_events "
        "outbound_pci_stalled_wr_events module_unplug module_bus_stuck module_high_temp module_bad_shorted "
        "rx_prio3_pause rx_prio3_pause_duration tx_prio3_pause tx_prio3_pause_duration rx_prio3_pause_transition"
    ).split()
)
"""What mlx5's driver shows beyond that, of what railscope takes in; one priority is lossless."""
COUNTED: Final = frozenset(
    (
        "multicast_rcv_packets multicast_xmit_packets port_rcv_packets port_xmit_packets unicast_rcv_packets "
        "unicast_xmit_packets rx_read_requests rx_write_requests duplicate_request np_cnp_sent "
        "np_ecn_marked_roce_packets rp_cnp_handled roce_slow_restart out_of_buffer local_ack_timeout_err "
        "out_of_sequence packet_seq_err roce_adp_retrans rx_packets tx_packets rx_dropped carrier_changes "
        "link_down_events_phy rx_out_of_buffer rx_discards_phy rx_corrected_bits_phy tx_bytes_phy rx_bytes_phy "
        "rx_vport_rdma_unicast_packets rx_vport_rdma_unicast_bytes tx_vport_rdma_unicast_packets "
        "tx_vport_rdma_unicast_bytes outbound_pci_stalled_rd_events outbound_pci_stalled_wr_events rx_prio3_pause "
        "rx_prio3_pause_duration rx_prio3_pause_transition tx_prio3_pause tx_prio3_pause_duration"
    ).split()
)
"""Those that are not 0; that all is well shows in which are missing."""
NVLINK_ERRORS: Final = ("replay", "recovery", "crc")
_OPS: Final = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "SendRecv")
_DTYPES: Final = {"AllReduce": ("bfloat16", "float32"), "Broadcast": ("uint8",)}
_SIZES: Final = {"AllReduce": 4, "AllGather": 4, "ReduceScatter": 4, "Broadcast": 2, "SendRecv": 2}
"""How many different sizes, in powers of two, an operation is called with."""
_WAYS: Final = (("Ring", "Simple", 16), ("Ring", "LL", 2), ("Tree", "LL128", 16), ("NVLS", "Simple", 16))
_RATES: Final = Histogram(RATE_BOUNDS, (1,) * (len(RATE_BOUNDS) + 1), 1.0)
_QUEUE: Final = RailQueue("mq", 0, 0, 0, 0, 0)
_TCP: Final = RailTcp(8, 8, 1e-4, 1e-3, 1e-5, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1.0, 1.0, 1.0)
_NO_TCP: Final = RailTcp(0, 0, None, None, None, None, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
_DIRECTION_LEDGER: Final = DirectionLedger(
    {
        (TrafficOwner.NCCL, Origin.COLLECTIVE): 1,
        (TrafficOwner.NCCL, Origin.OVERHEAD): 1,
        (TrafficOwner.UNKNOWN, Origin.FOREIGN): 1,
    },
    0.01,
)
_LEDGER: Final = RailLedger(_DIRECTION_LEDGER, _DIRECTION_LEDGER)


def typical_node(communicators: int = GPUS * COMMUNICATORS_OF_A_GPU) -> Snapshot:
    """A made-up snapshot of a node while a job runs; with more communicators it is one of an untypical job."""
    numbers = range(communicators)
    ends = [(f"{number:016x}", str(number % 64)) for number in numbers]
    return Snapshot(
        realtime_ns=1,
        version="1.0.0",
        kernel="6.8.0",
        node=NodeIdentity("gpu-node-0042", "gpu-node-0042"),
        collectives=NodeCollectives(
            identity_conflicts=0,
            totals=tuple(
                CollectiveTotal(op, dtype, str(gpu), 1, 1)
                for op in _OPS
                for dtype in _DTYPES.get(op, ("bfloat16",))
                for gpu in range(GPUS)
            ),
            sizes=_of_each_operation(SIZE_BOUNDS),
            enqueue_times=_of_each_operation(ENQUEUE_BOUNDS),
            communicators=tuple(
                _communicator(comm, rank, gpu=number % GPUS) for number, (comm, rank) in zip(numbers, ends, strict=True)
            ),
            events=dict.fromkeys(("init", "finalize", "destroy", "abort", "revoke"), 0),
            completion=NodeCompletion(
                durations=_of_each_operation(DURATION_BOUNDS),
                bandwidths=_of_each_operation(BANDWIDTH_BOUNDS),
                launches=tuple(LaunchTotal(op, *way, 1) for op in _OPS[:3] for way in _WAYS),
            ),
            times=NodeTimes(
                by_rank=tuple(RankTimes(comm, rank, 1, 1.0) for comm, rank in ends),
                by_size=tuple(CompletedTotal(op, 1 << at, 1, 1, 1, 1.0) for op in _OPS for at in range(_SIZES[op])),
                arrivals=tuple(RankArrivals(comm, rank, 1, 1.0, 1.0) for comm, rank in ends),
            ),
        ),
        rails=(
            *(rail for number in range(GPUS) for rail in _port(str(number))),
            _device(str(GPUS), "eth0", rdma=False),
        ),
        gpus=NodeGpus(
            tuple(
                GpuFacts(
                    gpu=str(gpu),
                    uuid=f"GPU-{gpu}",
                    pci=f"0000:{gpu:02x}:00.0",
                    name="GPU",
                    numa="0",
                    fabric="completed",
                    fabric_unhealthy=(),
                    pcie_transmit_bytes=1,
                    pcie_receive_bytes=1,
                    refresh_seconds=0.1,
                    fabric_health_mask=0,
                    fabric_error=0,
                    slowed_by=(),
                    recovery_action="none",
                )
                for gpu in range(GPUS)
            ),
            tuple(_nvlink(str(gpu), str(link)) for gpu in range(GPUS) for link in range(NVLINKS_OF_A_GPU)),
        ),
        stalls=NodeStalls(totals=(StallTotal("AllReduce", Cause.RANK_BEHIND, 1),)),
        health=_health(),
    )


def _health() -> AgentHealth:
    results = (("stall", "written"), ("stall", "failed"), ("signal", "written"), ("signal", "failed"))
    programs = ("calls", "communicators", "completion", "proxy", "rails", "launches", "errors", "events")
    return AgentHealth(
        started_realtime_ns=1,
        own_process=OwnProcessFacts(
            cpu_seconds=12.5,
            resident_bytes=44 << 20,
            virtual_bytes=500 << 20,
            open_descriptors=60,
            most_descriptors=1 << 20,
            start_seconds=1_700_000_000.5,
        ),
        loop=LoopFacts(0.02, 0.01),
        collectors=tuple(
            CollectorResult(name, True, 0.001, 0)
            for name in (
                "collective",
                "netdev",
                "rdma",
                "ethtool",
                "qdisc",
                "tcp",
                *(f"nvlink gpu{n}" for n in range(8)),
            )
        ),
        probes=ProbeHealth(
            processes_observed=GPUS,
            attached=tuple(AttachedProbe("libnccl.so.2", "2.28.9", program, True, "build-id") for program in programs),
            levels=(ProbeLevel("libnccl.so.2", "2.28.9", 2, 3),),
            events_lost=dict.fromkeys(("ring_full", "decode", "maps_full"), 0),
            overhead_seconds=dict.fromkeys(programs[:6], 0.1),
        ),
        recordings=dict.fromkeys(results, 0),
    )


def _of_each_operation(bounds: tuple[float, ...]) -> tuple[OpHistogram, ...]:
    return tuple(OpHistogram(op, Histogram(bounds, (1,) * (len(bounds) + 1), 1.0)) for op in _OPS)


def _communicator(comm: str, rank: str, gpu: int) -> CommunicatorFacts:
    return CommunicatorFacts(
        identity=RankIdentity(
            comm=comm,
            rank=rank,
            nranks="64",
            gpu=str(gpu),
            node_rank="0",
            local_ranks="8",
            nccl_version="2.28.9",
            pid=4000 + gpu,
            netns="4026531840",
            job=(("job", "pretrain"), ("job_id", "123456"), ("user", "ada")),
            identity_source="layout",
            gpu_uuid=f"GPU-00000000-0000-0000-0000-{gpu:012d}",
            pci_bus_id=f"00000000:1{gpu}:00.0",
        ),
        enqueued=1,
        ops=(),
        alive=True,
        completed=1,
        inflight_seconds=0.0,
        whole=True,
        position=1,
        # Of the ranks of a communicator on one host one tells it: about every other end is alone or the first.
        signature=1 if gpu % 2 == 0 else None,
    )


def _port(number: str) -> tuple[RailFacts, RailFacts]:
    return _rdma(number), _device(number, f"ens{number}np0", rdma=True)


def _rdma(number: str) -> RailFacts:
    known = _rail(number, f"mlx5_{number}", RDMA_COUNTERS)
    known = replace(known, port="1", transmit_collective_bytes=1, physical_state="LinkUp", firmware="28", board="MT")
    return replace(known, lanes=4, speed_to_siblings=1.0, lanes_to_siblings=1.0)


def _device(number: str, name: str, *, rdma: bool) -> RailFacts:
    """A network device; one under an RDMA port has the statistics of its driver, and no connection of a job's."""
    known = _rail(number, name, LINK_COUNTERS + (DRIVER_COUNTERS if rdma else ()))
    if not rdma:
        return replace(known, queue=_QUEUE, tcp=_TCP)
    return replace(known, queue=_QUEUE, tcp=_NO_TCP, pci_stalled=(("read", 0.0), ("write", 0.0)))


def _rail(number: str, device: str, counters: tuple[str, ...]) -> RailFacts:
    return RailFacts(
        rail=number,
        device=device,
        port="",
        netdev=device,
        netns="",
        pci=f"0000:{int(number):02x}:00.0",
        numa="0",
        gpu=number,
        link_layer="Ethernet",
        driver="mlx5_core",
        up=True,
        speed_bytes_per_second=50_000_000_000,
        transmit_bytes=1,
        receive_bytes=1,
        transmit_wire_bytes=1,
        receive_wire_bytes=1,
        transmit_explained_ratio=1.0,
        receive_explained_ratio=1.0,
        transmit_rate=_RATES,
        receive_rate=_RATES,
        counters=tuple((name, _severity(name), int(name in COUNTED)) for name in counters),
        ledger=_LEDGER,
        transmit_utilization=0.5,
        receive_utilization=0.5,
    )


def _severity(counter: str) -> str:
    if counter in SEVERITIES:
        return SEVERITIES[counter]
    statistic = statistic_rule(counter)
    return rule_of(counter).severity if statistic is None else statistic.severity


def _nvlink(gpu: str, link: str) -> NvlinkFacts:
    errors = tuple((kind, 0) for kind in NVLINK_ERRORS)
    return NvlinkFacts(gpu, link, True, 1, 1, "data", errors, 26_562_500_000, f"0000:0{gpu}:00.0", "switch", 0.1, 0.1)
