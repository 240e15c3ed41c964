"""Alerts on what breaks before it hurts: links that are unsteady, PCIe, modules, GPUs, and the kernel's log.

Each asks what agents tell of now, or of a day at most.  What a machine does while it boots is told by none: agents
count from when they first look, and leave out what the kernel's log says of links until five minutes after the boot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Severity
from railscope.agent.facts.hardware_evidence import HARMFUL_REASONS, RECOVERED_STATE
from railscope.dashboards import recorded
from railscope.dashboards.alerting.alert import Alert, Group, promql
from railscope.dashboards.alerting.rails import HOST, RAIL
from railscope.dashboards.alerting.thresholds import Thresholds

_OF_RAIL: Final = "rail {{ $labels.rail }} ({{ $labels.device }}) of {{ $labels.instance }}"
_GPU: Final = "GPU {{ $labels.gpu }} of {{ $labels.instance }}"
_SAID_FOR: Final = "None: the event has happened, and the alert stands for an hour."
_LINK_LOST: Final = 'counter=~"carrier_changes|link_downed|link_down_events(_phy)?"'
_PAUSED: Final = 'counter=~"rx_.*(pause|pfc|xoff).*|.*_rx_(pause_phy|transitions)|port_xmit_wait"'
_UNCORRECTABLE: Final = 'result="uncorrectable"'
_SLOWED_BY: Final = f'reason=~"{"|".join(HARMFUL_REASONS)}"'
_RECOVERED: Final = f'state="{RECOVERED_STATE}"'
_BY_DRIVER: Final = "xid|sxid|gpu"
_BROKEN_GPU: Final = f'kind=~"{_BY_DRIVER}",severity="page"'
_ILL_GPU: Final = f'kind=~"{_BY_DRIVER}",severity="warn"'
_ILL_ELSEWHERE: Final = f'kind!~"{_BY_DRIVER}",severity=~"page|warn"'
_EVENT: Final = "{{ $labels.kind }} {{ $labels.code }}"
_RECOVERIES: Final = catalogue.GPU_NVLINK_ERRORS.where('kind=~"recovery|recovery_successful|recovery_events"')
_RECOVERING_LINKS: Final = (
    f"{{{{ with printf \"{catalogue.NVLINK_ERRORS}{{cluster='%s',instance='%s',gpu='%s',"
    "kind=~'recovery|recovery_events'}\" $labels.cluster $labels.instance $labels.gpu "
    '| query | sortByLabel "link" }} So far:{{ range . }} link {{ .Labels.link }} '
    '({{ printf "%.0f" .Value }}){{ end }}.{{ end }}'
)


def alerts(least: Thresholds) -> Iterator[Alert]:
    """Alerts on the condition of hardware, in the order of the rules' file."""
    yield from _links(least)
    yield from _nvlinks(least)
    yield from _gpus()
    yield from _log()


def _links(least: Thresholds) -> Iterator[Alert]:
    yield Alert(
        Group.HARDWARE,
        "RailscopeRailLinkUnstable",
        Severity.WARNING,
        promql(
            f"""
            {catalogue.RAIL_PHYSICAL_STATE.where(_RECOVERED)} == 1
            or
            (
                {catalogue.RAIL_PHYSICAL_STATE} == 1
              and on ({RAIL}, port)
                {catalogue.RAIL_UP} == 1
            )
            """
        ),
        about="A port whose link is being recovered still counts as up.  A port that is down has another alert.",
        holds_for="1m",
        because="A link trains for some seconds.",
        summary=f"The link of {_OF_RAIL} is in {{{{ $labels.state }}}}",
        description="The port counts as up and its physical link is in {{ $labels.state }}: packets are lost while it "
        "is recovered. Look at the cable, the module and the switch port.",
        page="LinkUnsteady",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopeRailFlaps",
        Severity.WARNING,
        f"increase({catalogue.RAIL_COUNTER.where(_LINK_LOST)}[1h]) >= {least.rail_flaps_per_hour:g}",
        about="The kernel counts two changes of the carrier each time that a link goes and comes back.",
        holds_for="0s",
        because="None: the hour of the range is enough.",
        summary=f"The link of {_OF_RAIL} flaps",
        description="{{ $labels.counter }} of {{ $labels.device }} rose by "
        '{{ printf "%.0f" $value }} within an hour: the link comes and goes, and jobs on it stall or break each time.',
        page="LinkUnsteady",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopeRailPaused",
        Severity.WARNING,
        promql(
            f"""
            (
                max by ({HOST}, netns, rail) (rate({catalogue.RAIL_COUNTER.where(_PAUSED)}[5m]))
                > {least.pauses_per_second:g}
              and on ({HOST}, netns, rail)
                max by ({HOST}, netns, rail) ({recorded.TRANSMIT_RATE}) < {least.rail_used_bytes_per_second:g}
            )
            and on ({HOST}, netns, rail)
            max by ({HOST}, netns, rail) ({recorded.TRANSMIT_GREATEST}) > {least.rail_used_bytes_per_second:g}
            and on ({HOST})
            {catalogue.PROCESSES_OBSERVED} > 0
            """
        ),
        about="Pauses are flow control at work as long as bytes move.  Where a port of a job is paused and "
        "nothing gets through, the network is stuck: a pause storm, or a deadlock of PFC.",
        holds_for="2m",
        because="A receiver that is busy for a moment pauses, too.",
        summary="Rail {{ $labels.rail }} of {{ $labels.instance }} is paused and sends nothing",
        description="The network pauses rail {{ $labels.rail }} {{ $value | humanize }} times a second, and nothing is "
        "sent on it though a job runs: look for a host or switch port that pauses without end.",
        page="LinkUnsteady",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopeRailModuleAlarm",
        Severity.WARNING,
        promql(
            f"""
            {catalogue.RAIL_MODULE_ALARM} == 1
            and on ({HOST}, rail)
            max by ({HOST}, rail) ({catalogue.RAIL_UP}) == 1
            """
        ),
        about="The limits are those that the vendor wrote into the module; a warning's limit is passed weeks before an "
        "alarm's.",
        holds_for="10m",
        because="A fan has started by then, and a cable that somebody touched is at rest.",
        summary=f"The module of {_OF_RAIL} reports {{{{ $labels.alarm }}}}",
        description="{{ $labels.alarm }}{{ with $labels.lane }} on lane {{ . }}{{ end }}: the module of "
        "{{ $labels.device }} is outside its own limits. Light that fades, or a module that is too hot, takes the link "
        "down sooner or later.",
        page="ModuleAndErrorCorrection",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopeRailUncorrectable",
        Severity.WARNING,
        f"rate({catalogue.RAIL_FEC_BLOCKS.where(_UNCORRECTABLE)}[5m]) > 0",
        about="Each such block was lost on the wire.",
        holds_for="10m",
        because="A link that has just been trained counts some, and is out of the range by then.",
        summary=f"Error correction of {_OF_RAIL} fails",
        description="{{ $value | humanize }} blocks a second of {{ $labels.device }} arrive too damaged to be mended: "
        "packets are lost. Look at the cable and the module.",
        page="ModuleAndErrorCorrection",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopePcieLinkDegraded",
        Severity.WARNING,
        promql(
            f"""
            {catalogue.PCIE_LINK_RATIO.where('of="width"')} < 1
            or
            {catalogue.PCIE_LINK_RATIO.where('of="speed",device!~"gpu.*"')} < 1
            """
        ),
        about="Compared with what both ends of the link support.  A GPU lowers the speed of its link while it is "
        "idle, so that of GPUs only the width counts.",
        holds_for="10m",
        because="Devices that were reset train their link anew.",
        summary="The PCIe link of {{ $labels.device }} of {{ $labels.instance }} is degraded",
        description="{{ $labels.device }} ({{ $labels.pci }}) runs at {{ $value | humanizePercentage }} of the "
        "{{ $labels.of }} that both ends of its PCIe link support: whatever it moves to memory is slower by as much.",
        page="PcieLink",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopePcieErrors",
        Severity.WARNING,
        promql(
            f"""
            rate({catalogue.PCIE_ERRORS}[15m]) > {least.pcie_errors_per_second:g}
            or
            label_replace(
              rate({catalogue.GPU_PCIE_ERRORS.where('kind="replay"')}[15m]) > {least.pcie_errors_per_second:g},
              "device", "gpu$1", "gpu", "(.*)"
            )
            """
        ),
        about="PCIe mends such errors by sending again, which costs time; they are the sign of a bad slot, riser or "
        "cable.  Single ones are normal.",
        holds_for="15m",
        because="Only a rate that lasts matters.",
        summary="The PCIe link of {{ $labels.device }} of {{ $labels.instance }} has errors",
        description="PCIe errors of {{ $labels.device }} ({{ with $labels.error }}{{ . }}{{ else }}replays{{ end }}) "
        "rise by {{ $value | humanize }} a second.",
        page="PcieLink",
    )


def _nvlinks(least: Thresholds) -> Iterator[Alert]:
    yield Alert(
        Group.HARDWARE,
        "RailscopeNVLinkRecovers",
        Severity.WARNING,
        promql(
            f"""
            max by ({HOST}, gpu) (
                ({_RECOVERIES} - {_RECOVERIES} offset 2h) >= {least.nvlink_recoveries:g}
              and
                (
                    {_RECOVERIES} offset 2h
                  -
                    ({_RECOVERIES} offset 1d or 0 * {_RECOVERIES} offset 2h)
                ) >= {least.nvlink_recoveries:g}
            )
            """
        ),
        about="A link that has to be recovered again and again fails within days.  One burst, as of a reset, is in the "
        "last two hours or before them, and not in both; a sound link recovers a few times a month.",
        holds_for="0s",
        because="None: the expression covers two hours and those before them.",
        summary=f"NVLinks of {_GPU} recover again and again",
        description='{{ printf "%.0f" $value }} recoveries within two hours, and several before: the link is about to '
        f"fail.{_RECOVERING_LINKS}",
        page="NVLinkErrors",
    )


def _gpus() -> Iterator[Alert]:
    yield Alert(
        Group.HARDWARE,
        "RailscopeGpuMemory",
        Severity.WARNING,
        promql(
            f"""
            {catalogue.GPU_ECC_ERRORS.where('kind="uncorrected",since="volatile"')} > 0
            or on ({HOST}, gpu)
            {catalogue.GPU_ROW_REMAP_FAILED} == 1
            or on ({HOST}, gpu)
            {catalogue.GPU_ROW_REMAP_PENDING} == 1
            """
        ),
        about="Memory errors since the driver was loaded that could not be corrected, rows that could not be exchanged "
        "for spare ones, and rows that wait for a reset to be exchanged.",
        holds_for="1m",
        because="One more scrape.",
        summary=f"The memory of {_GPU} is failing",
        description=f"{_GPU} has memory errors that were not corrected, or a row of memory that waits to be exchanged "
        "or cannot be: reset it after the job, and replace it if that does not help.",
        page="GpuCondition",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopeGpuWantsRecovery",
        Severity.CRITICAL,
        f"{catalogue.GPU_RECOVERY_ACTION} == 1",
        about="The driver itself says that the GPU does not go on working without it.",
        holds_for="1m",
        because="A GPU that is being reset is back by then.",
        summary=f"The driver asks for {{{{ $labels.action }}}} of {_GPU}",
        description=f"{_GPU} needs {{{{ $labels.action }}}}: its jobs are over or will be, and new ones fail on it.",
        page="GpuCondition",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopeGpuSlowed",
        Severity.WARNING,
        f"{catalogue.GPU_SLOWED.where(_SLOWED_BY)} == 1",
        about="Heat and lack of power; not the power cap, which a busy job reaches by itself.",
        holds_for="10m",
        because="Short slowdowns come with bursts of load.",
        summary=f"{_GPU} is slowed down ({{{{ $labels.reason }}}})",
        description=f"{{{{ $labels.reason }}}} holds the clocks of {_GPU} down: every rank of its jobs waits for it.",
        page="GpuCondition",
    )


def _log() -> Iterator[Alert]:
    last = catalogue.HARDWARE_EVENT_TIMESTAMP
    yield Alert(
        Group.HARDWARE,
        "RailscopeXid",
        Severity.CRITICAL,
        f"(time() - {last.where(_BROKEN_GPU)}) < 3600",
        about="XIDs, and other events of NVML, that mean a broken GPU, NVLink or NVSwitch; not those that a program "
        "causes.",
        holds_for="0s",
        because=_SAID_FOR,
        summary=f"{_EVENT} of {{{{ $labels.pci }}}} of {{{{ $labels.instance }}}}",
        description="NVIDIA's driver told of {{ $labels.kind }} {{ $labels.code }} of {{ $labels.pci }}, "
        "{{ $value | humanizeDuration }} ago: hardware failed there, and so did the jobs on it.",
        page="HardwareEvents",
    )
    yield Alert(
        Group.HARDWARE,
        "RailscopeHardwareEvent",
        Severity.WARNING,
        promql(
            f"""
            (time() - {last.where(_ILL_ELSEWHERE)}) < 3600
            or
            (time() - {last.where(_ILL_GPU)}) < 3600
            """
        ),
        about="What the kernel's log says of PCIe, network cards and the machine, and what NVIDIA's driver reports "
        "that a job may survive.",
        holds_for="0s",
        because=_SAID_FOR,
        summary=f"{_EVENT} of {{{{ with $labels.pci }}}}{{{{ . }}}} of {{{{ end }}}}{{{{ $labels.instance }}}}",
        description="The kernel's log, or NVIDIA's driver, told of {{ $labels.kind }} {{ $labels.code }}"
        "{{ with $labels.pci }} of {{ . }}{{ end }}, {{ $value | humanizeDuration }} ago.",
        page="HardwareEvents",
    )
