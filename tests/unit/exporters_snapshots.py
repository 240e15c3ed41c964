"""Snapshots for the exporters' tests: one with something of everything, and one as large as asked.

Simulated: the values are made up to be easy to recognise in an exposition.
"""

from __future__ import annotations

from dataclasses import replace

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.hardware import (
    BoundCounterFacts,
    GpuFacts,
    HardwareEvent,
    ModuleFacts,
    NeighbourFacts,
    NodeCondition,
    NodeFabric,
    NodeGpus,
    NodeQueuePairs,
    NvlinkFacts,
    PcieFacts,
    QueuePairCount,
    QueuePairFacts,
)
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.rail_ledger import DirectionLedger, Origin, RailLedger
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.agent.facts.slowness import Slowness
from railscope.agent.facts.snapshot import (
    AgentHealth,
    AttachedProbe,
    CollectiveTotal,
    CollectorResult,
    CommunicatorFacts,
    CommunicatorStall,
    CompletedTotal,
    DriverCallsOfProcess,
    EstimatedCalls,
    FailedOver,
    JobSteps,
    LaunchTotal,
    LoopFacts,
    NodeCollectives,
    NodeCompletion,
    NodeIdentity,
    NodeStalls,
    NodeTimes,
    OpHistogram,
    OpTotal,
    OwnProcessFacts,
    PeerTotal,
    ProbeHealth,
    ProbeLevel,
    RailFacts,
    RailQueue,
    RailTcp,
    RankArrivals,
    RankPace,
    RankTimes,
    Snapshot,
    StallTotal,
    UnjoinedProcess,
)
from railscope.agent.facts.stall import Diagnosis, LastCollectives, Stall
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.facts.transfers import NodeTransfers, PeerTransfers, TransferTotal, TransferUnderWay
from tests.unit.identities import named

RATES = Histogram(bounds=(1e6, 1e9, 2.5e10), counts=(7, 2, 1, 0), sum=2.25e9)


def communicator(comm: str = "00c0ffee00c0ffee", rank: str = "0", pid: int = 4711) -> CommunicatorFacts:
    return CommunicatorFacts(
        identity=RankIdentity(
            comm=comm,
            rank=rank,
            nranks="4",
            gpu="0",
            node_rank="0",
            local_ranks="2",
            nccl_version="2.27.3",
            pid=pid,
            netns="4026531840",
            job=(("job", "pretrain"), ("user", "ada")),
            identity_source="layout",
            gpu_uuid="GPU-7b8c",
            pci_bus_id="00000000:1B:00.0",
        ),
        enqueued=1200,
        ops=(OpTotal("AllReduce", 1200, 1200 << 20),),
        alive=True,
        completed=1199,
        inflight_seconds=0.25,
        captured=4,
        replayed=400,
        whole=True,
        position=1196,
        signature=(3 << 17 | 2) << 32 | 0xC0FFEE,
    )


def rail(number: str = "0", device: str = "mlx5_0") -> RailFacts:
    return RailFacts(
        rail=number,
        device=device,
        port="1",
        netdev=f"ib{number}",
        netns="",
        pci=f"0000:1{number}:00.0",
        numa="0",
        gpu=number,
        link_layer="InfiniBand",
        driver="mlx5_core",
        up=True,
        speed_bytes_per_second=50_000_000_000,
        transmit_bytes=2**63 + 1,
        receive_bytes=987_654_321,
        transmit_wire_bytes=2**62,
        receive_wire_bytes=900_000_000,
        transmit_explained_ratio=0.5,
        receive_explained_ratio=0.911,
        transmit_rate=RATES,
        receive_rate=replace(RATES, sum=None),
        counters=(("link_downed", "page", 1), ("np_cnp_sent", "context", 42)),
        transmit_collective_bytes=2**62 - 5,
        queue=RailQueue("mq", 4096, 3, 5, 6, 7),
        tcp=RailTcp(4, 2, 0.0005, 0.002, 0.0001, 10**9, 1, 12, 0, 2**40, 2**39, 9, 1448, 1, 10**6, 12.5, 0.25, 0.0),
        pinned=("symbol_error",),
        gauges=(("num_qps_congested", 4),),
        physical_state="LinkErrorRecovery",
        firmware="28.39.1002",
        board="MT_0000000838",
        bond_members=(("ens24f0np0", True), ("ens24f1np1", False), ("ens25", None)),
        pci_stalled=(("read", 0.25), ("write", 0.0)),
        ledger=RailLedger(
            DirectionLedger(
                {
                    (TrafficOwner.NCCL, Origin.COLLECTIVE): 2**62,
                    (TrafficOwner.NCCL, Origin.OVERHEAD): 2**55,
                    (TrafficOwner.NCCL, Origin.RETRANSMISSION): 3000,
                    (TrafficOwner.NCCL, Origin.OFFLOAD): 6000,
                    (TrafficOwner.TCP_OTHER, Origin.UNSEEN): 5000,
                    (TrafficOwner.UCX, Origin.TRANSFER): 7000,
                    (TrafficOwner.UCX, Origin.OVERHEAD): 800,
                    (TrafficOwner.STORAGE, Origin.FOREIGN): 4000,
                },
                0.004,
            ),
            DirectionLedger(
                {
                    (TrafficOwner.NCCL, Origin.COLLECTIVE): 900_000_000,
                    (TrafficOwner.NCCL, Origin.OVERHEAD): 9_000_000,
                    (TrafficOwner.UNKNOWN, Origin.FOREIGN): 70_000,
                },
                None,
            ),
        ),
        transmit_utilization=0.875,
        receive_utilization=0.0,
    )


def full_snapshot() -> Snapshot:
    """Something of everything, with the values that are awkward to write down."""
    unknown = replace(
        named(
            communicator(comm="unknown", rank="unknown", pid=4713),
            identity_source="unknown",
            job=(("pod", 'trainer "a"\\0'), ("rank", "not ours to overwrite")),
        ),
        enqueued=3,
        estimated=2,
        completed=None,
        inflight_seconds=None,
        captured=0,
        replayed=0,
        whole=False,
        position=None,
    )
    soft_rail = replace(
        rail("1", "rxe0"),
        netns="tenant-b",
        up=None,
        speed_bytes_per_second=None,
        transmit_wire_bytes=None,
        receive_wire_bytes=None,
        transmit_explained_ratio=None,
        receive_explained_ratio=None,
        counters=(),
        transmit_collective_bytes=None,
        queue=None,
        tcp=None,
        pinned=(),
        bond_members=(),
        pci_stalled=(),
        ledger=None,
        transmit_utilization=None,
        receive_utilization=None,
    )
    return Snapshot(
        realtime_ns=1_750_000_000_250_000_000,
        version="0.1.0",
        kernel="6.8.0",
        node=NodeIdentity("gpu-17", "gpu-17.example"),
        monotonic_ns=8_500_000_000,
        simulated=True,
        collectives=NodeCollectives(
            totals=(
                CollectiveTotal("AllReduce", "Bfloat16", "0", calls=1200, payload_bytes=1200 << 20),
                CollectiveTotal("Send", "Float32", "unknown", calls=5, payload_bytes=0),
            ),
            estimated=(EstimatedCalls("AllReduce", 3, 3072, 0.25),),
            sizes=(OpHistogram("AllReduce", Histogram((1.0, 1024.0, 1048576.0), (0, 0, 1200, 0), sum=1258291200.0)),),
            enqueue_times=(OpHistogram("AllReduce", Histogram((1e-06, 0.0001, 0.5), (0, 9, 1, 0), sum=None)),),
            communicators=(communicator(), communicator(rank="1", pid=4712), unknown),
            peers=(
                PeerTotal("00c0ffee00c0ffee", "0", "1", "ring", 3 << 29),
                PeerTotal("00c0ffee00c0ffee", "1", "0", "call", 4096),
                PeerTotal("00c0ffee00c0ffee", "1", "other", "call", 2**61),
            ),
            events={"init": 3, "abort": 0},
            errors={"remote_error": 1},
            failed_over={"IBV_WC_WR_FLUSH_ERR": 0, "IBV_WC_RETRY_EXC_ERR": 3},
            degraded=(
                FailedOver(
                    *("00c0ffee00c0ffee", "1", "mlx5_0", "1", "mlx5_1", "IBV_WC_RETRY_EXC_ERR"),
                    vendor_error=0x81,
                    connections=3,
                ),
            ),
            identity_conflicts=2,
            unjoined=(UnjoinedProcess(4713, "4711", "2", "8"),),
            jobs=(
                JobSteps(
                    "00c0ffee00c0ffee",
                    "0",
                    13,
                    Histogram((0.25, 0.5, 1.0), (0, 8, 3, 0), 5.5),
                    0.75,
                    {"waiting": 0.5, "communication": 3.0, "between": 1.25, "silent": 0.75},
                    {"start": 20.0, "steps": 6.0, "stalled": 0.0, "checkpoint": 1.5, "other": 0.5},
                ),
            ),
            completion=NodeCompletion(
                durations=(OpHistogram("AllReduce", Histogram((1e-06, 0.0001, 0.5), (0, 7, 3, 0), sum=0.75)),),
                bandwidths=(OpHistogram("AllReduce", Histogram((1e6, 1e9), (0, 10, 0), sum=2.5e9)),),
                launches=(LaunchTotal("AllReduce", "Ring", "Simple", 4, 1200),),
            ),
            times=NodeTimes(
                by_rank=(RankTimes("00c0ffee00c0ffee", "1", 100, 1.25),),
                by_size=(CompletedTotal("AllReduce", 1 << 20, 100, 100 << 20, 150 << 20, 1.25),),
                arrivals=(RankArrivals("00c0ffee00c0ffee", "1", 12, 0.75, 0.5),),
            ),
        ),
        rails=(rail(), soft_rail),
        gpus=NodeGpus(
            devices=(
                GpuFacts(
                    gpu="0",
                    uuid="GPU-7b8c",
                    pci="0000:1b:00.0",
                    name="NVIDIA H200",
                    numa="0",
                    fabric="completed",
                    fabric_unhealthy=("route",),
                    pcie_transmit_bytes=2**62,
                    pcie_receive_bytes=7,
                    refresh_seconds=0.1,
                    fabric_health_mask=5461,
                    fabric_error=999,
                    fabric_cluster="7ac5e3a0-0000-4000-8000-000000000001",
                    fabric_clique="32766",
                    ecc_errors=(("corrected", "volatile", 3), ("uncorrected", "aggregate", 1)),
                    remapped_rows=(("uncorrected", 1),),
                    remap_pending=True,
                    remap_failed=True,
                    pcie_errors=(("replay", 4),),
                    slowed_by=("hardware_thermal",),
                    recovery_action="gpu_reset",
                ),
                GpuFacts(
                    "1", "GPU-9d", "0000:1c:00.0", "NVIDIA H200", "unknown", "not_supported", (), None, None, None
                ),
            ),
            nvlinks=(
                NvlinkFacts(
                    gpu="0",
                    link="3",
                    up=True,
                    transmit_bytes=2**61,
                    receive_bytes=5,
                    counted="data",
                    errors=(("crc", 2),),
                    speed_bytes_per_second=26_562_500_000,
                    remote="0000:1c:00.0",
                    remote_type="gpu",
                    transmit_utilization=0.5,
                    receive_utilization=0.0,
                    bit_error_ratios=(("effective", 3e-12),),
                    fec_blocks=(("0", 10**12), ("3", 5), ("15", 2)),
                ),
                NvlinkFacts("1", "all", None, 77, 78, "data", (), None, "unknown", "unknown"),
            ),
        ),
        condition=NodeCondition(
            pcie=(
                PcieFacts("mlx5_0", "0000:18:00.0", 8, 16, 32.0, 32.0, (("0000:17:00.0", "correctable", "RxErr", 3),)),
            ),
            modules=(
                ModuleFacts(
                    rail="0",
                    device="eth0",
                    form="osfp",
                    temperature_celsius=61.5,
                    receive_watts=0.0007,
                    transmit_watts=0.001,
                    alarms=(("3", "receive_power_low"),),
                    corrected_blocks=10**12,
                    uncorrectable_blocks=1,
                    fec_histogram=((0, 0, 10**13), (1, 1, 5)),
                ),
            ),
            events=(HardwareEvent("xid", "79", "0000:1b:00.0", "page", 1, 1_750_000_000.5),),
        ),
        fabric=NodeFabric(
            neighbours=(NeighbourFacts("0", "eth0", "leaf-a", "Ethernet1/3"),),
            queue_pairs=NodeQueuePairs(
                read_ns=5_000_000_000,
                queue_pairs=(QueuePairFacts("mlx5_0", 1, 77, 88, "10.1.2.3", "RC", "RTS", 4711, ""),),
                counts=(QueuePairCount("mlx5_0", "4711", "connected", 1),),
                bound=(BoundCounterFacts("mlx5_0", 1, 5, (77,), (("rx_write_requests", 12),)),),
            ),
            queue_pair_owners={("mlx5_0", 77): frozenset({TrafficOwner.NCCL, TrafficOwner.NIXL})},
        ),
        stalls=NodeStalls(
            lengths=(
                CommunicatorStall("00c0ffee00c0ffee", "1", "rail_down", 2.5, stall()),
                CommunicatorStall("00c0ffee00c0ffee", "1", "unknown", 0.5, None),
                CommunicatorStall("00c0ffee00c0ff02", "0", "inside_call", 2.5, inside_call()),
            ),
            totals=(StallTotal("AllReduce", "rail_down", 1),),
            ended=(stall(ended_ns=7_000_000_000),),
            writing=(("00c0ffee00c0ffee", "0"),),
            slow=(RankPace("00c0ffee00c0ffee", "1", 0.875, 0.4, Slowness(1_750_000_000.0, 11, 12, 118), "calls"),),
            last=(
                (
                    ("00c0ffee00c0ffee", "1"),
                    LastCollectives(1200, ("AllGather of 8 bytes", "AllReduce of 1048576 bytes float32")),
                ),
            ),
            driver_calls=(
                DriverCallsOfProcess(4711, 1200, "", 0.0),
                DriverCallsOfProcess(4712, 1199, "cuStreamSynchronize", 40.5),
            ),
        ),
        transfers=NodeTransfers(
            (
                TransferTotal("nixl", "Write", "transmit", 20, 167772160, 0, 1, 0, Histogram((0.001,), (18, 1), 0.357)),
                TransferTotal("ucx", "TagRecv", "receive", 7, None, 7, 0, 7, None),
            ),
            (TransferUnderWay("nixl", "Write", 4713, 2, 12.5, "decode-0"),),
            (
                PeerTransfers(
                    "nixl",
                    "Write",
                    "transmit",
                    4713,
                    "decode-0",
                    20,
                    167772160,
                    18,
                    1,
                    0.357,
                    Histogram((0.001,), (17, 1), 0.357),
                ),
                PeerTransfers("ucx", "TagRecv", "receive", 4713, "", 7, None, 0, 0, 0.0, None),
            ),
            most_peers=8,
            probed=(("/opt/venv/libnixl.so", "nixl", True), ("/opt/venv/libucp-b39b3ed9.so.0", "ucx", False)),
        ),
        health=AgentHealth(
            started_realtime_ns=1_749_999_000_500_000_000,
            own_process=OwnProcessFacts(
                cpu_seconds=12.5,
                resident_bytes=44 << 20,
                virtual_bytes=500 << 20,
                open_descriptors=60,
                most_descriptors=1 << 20,
                start_seconds=1_700_000_000.5,
            ),
            dark_seconds=1.5,
            loop=LoopFacts(late_seconds=0.75, late_recent_seconds=0.03125),
            collectors=(CollectorResult("rdma", True, 0.00125, 3), CollectorResult("ethernet", False, 2.0)),
            probes=ProbeHealth(
                processes_observed=3,
                attached=(
                    AttachedProbe("/opt/nccl/libnccl.so.2", "2.27.3", "all_reduce", True, "build-id"),
                    AttachedProbe("/opt/nccl/libnccl.so.2", "2.27.3", "all_to_all", False, "build-id"),
                ),
                levels=(ProbeLevel("/opt/nccl/libnccl.so.2", "2.27.3", 2, 3),),
                events_lost={"ring_full": 0, "decode": 2},
                limits_reached={("communicators", "5000"): 7},
                overhead_seconds={"all_reduce": 0.0625},
            ),
            recordings={("stall", "written"): 2, ("signal", "failed"): 1},
            http_refused={"half_open": 3, "password": 1},
            otlp_exports={"success": 59, "failure": 2, "dropped": 1},
            series_dropped={"communicator_limit": 0},
        ),
    )


def with_communicators(snapshot: Snapshot, *communicators: CommunicatorFacts) -> Snapshot:
    """The snapshot with these communicators and no others."""
    return replace(snapshot, collectives=replace(snapshot.collectives, communicators=communicators))


def without_ranks(snapshot: Snapshot) -> Snapshot:
    """The snapshot without what is told of single ranks beside their communicators: times, peers, failovers, steps."""
    times = replace(snapshot.collectives.times, by_rank=(), arrivals=())
    return replace(snapshot, collectives=replace(snapshot.collectives, times=times, peers=(), degraded=(), jobs=()))


def stall(*, ended_ns: int | None = None) -> Stall:
    """Of an AllReduce that was handed over at 6 s."""
    diagnosis = Diagnosis(
        Cause.RAIL_DOWN, ("rail 1 (rail1) has no carrier or is switched off",), culprit=True, rail="1", device="rail1"
    )
    return Stall(
        instance=7,
        comm="00c0ffee00c0ffee",
        rank="1",
        nranks="2",
        pid=4712,
        op="AllReduce",
        payload_bytes=1 << 20,
        since_ns=6_000_000_000,
        flagged_ns=8_000_000_000,
        realtime_offset_ns=1_750_000_000_250_000_000 - 8_500_000_000,
        flight_strength="strong",
        diagnosis=diagnosis,
        ended_ns=ended_ns,
    )


def inside_call() -> Stall:
    """Of an init at whose communicator's other rank nobody looks."""
    diagnosis = Diagnosis(Cause.INSIDE_CALL, ("thread 4712 has not returned from ncclCommInitRank",), culprit=False)
    return replace(
        stall(),
        instance=-1,
        comm="00c0ffee00c0ff02",
        rank="0",
        op="ncclCommInitRank",
        payload_bytes=None,
        diagnosis=diagnosis,
    )


def large_snapshot(communicators: int = 7_000, rails: int = 64) -> Snapshot:
    """About three thousand series of rails and two for each communicator."""
    base = full_snapshot()
    return replace(
        with_communicators(
            without_ranks(base),
            *(
                communicator(comm=f"{number // 8:016x}", rank=str(number % 8), pid=number + 2)
                for number in range(communicators)
            ),
        ),
        rails=tuple(
            replace(rail(str(number), f"mlx5_{number}"), counters=tuple((f"c{i}", "error", i) for i in range(30)))
            for number in range(rails)
        ),
    )
