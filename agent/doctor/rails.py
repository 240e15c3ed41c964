"""Shows which network devices the agent takes for rails, in its own namespace and in those of NCCL processes.

The agent's own reader (probes/netdev) lists them, and not pyroute2: a finding must hold for what the agent does on this
host, in the same namespaces and with the same refusals, and the doctor runs where the core alone is installed.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.config.unmatched import patterns_without_device
from railscope.agent.doctor.findings import Finding, RailReport, one_line, privilege_remedy
from railscope.agent.doctor.topology import rdma_of_host
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.node.rails.job_settings import sockets_only
from railscope.agent.node.rails.selection import decide_rails
from railscope.probes.clock import Clock
from railscope.probes.netdev.inventory import NetworkDevice
from railscope.probes.netdev.sources import DeviceSources, open_namespace, recorded_sources
from railscope.probes.processes.namespaces import (
    NamespaceError,
    NamespaceGone,
    NetworkNamespace,
    named_namespaces,
    network_namespace,
)
from railscope.probes.processes.processes import environ

_SYSFS: Final = Path("/sys")


def check_rails(
    config: Config, processes: Collection[int], clock: Clock
) -> tuple[list[Finding], tuple[RailReport, ...]]:
    """Findings about this host's rails, one report for each device; `processes` are those that have NCCL mapped.

    Raises:
        NamespaceError, OSError: not even the own devices can be listed.
    """
    findings: list[Finding] = []
    devices: list[NetworkDevice] = []
    own = 0
    namespaces: dict[int, NetworkNamespace] = {}
    interfaces: dict[int, set[str]] = {}
    with_jobs: set[int] = set()
    sockets: set[int] = set()
    if config.sysfs != _SYSFS:
        devices += _devices(recorded_sources(config.sysfs, clock=clock), "recorded", findings)
    else:
        refusals: list[str] = []
        namespace = network_namespace(config.procfs, "self")
        own = namespace.inode
        namespaces[own] = namespace
        for pid in sorted(processes):
            try:
                namespace = network_namespace(config.procfs, pid)
            except NamespaceGone:
                continue
            except NamespaceError as error:
                refusals.append(one_line(error))
                continue
            namespaces.setdefault(namespace.inode, namespace)
            with_jobs.add(namespace.inode)
            environment = environ(config.procfs, pid)
            interfaces.setdefault(namespace.inode, set()).add(environment.get("NCCL_SOCKET_IFNAME", ""))
            if sockets_only(environment.get("NCCL_IB_DISABLE", ""), environment.get("NCCL_NET", "")):
                sockets.add(namespace.inode)
        if refusals:
            what = f"of {format_count(len(refusals), 'process', 'es')} with NCCL unknown; the first: {refusals[0]}"
            findings.append(Finding("network namespace", "problem", what, privilege_remedy()))
        for namespace in namespaces.values():
            devices += _read_devices(namespace, config, clock, findings)
    rdma = rdma_of_host(config, processes)
    decisions = decide_rails(
        devices,
        patterns=config.rails,
        socket_interfaces={netns: sorted(values) for netns, values in interfaces.items()},
        rdma=rdma,
        home=[own],
        idle={device.netns for device in devices} - with_jobs,
        sockets=sockets,
    )
    names = named_namespaces()
    for decision in decisions:
        if decision.rail is not None:
            netns = decision.device.netns
            elsewhere = namespaces.get(netns) if netns != own else None
            place = f" in namespace {names.get(netns, f'net:[{netns}]')}" if elsewhere else ""
            inside = f"nsenter --net={elsewhere.path} " if elsewhere else ""
            findings.append(_finding(decision, decision.rail, place, inside))
    if not rdma.rails and not any(decision.rail is not None for decision in decisions):
        findings.append(_none(config, decisions))
    elif unmatched := patterns_without_device(config.rails, [*(one.device.name for one in decisions), *rdma.names]):
        findings.append(Finding("rail", "problem", f"--rail.devices: {unmatched}", "correct --rail.devices"))
    return findings, tuple(_report(decision, own) for decision in decisions)


def _read_devices(
    namespace: NetworkNamespace, config: Config, clock: Clock, findings: list[Finding]
) -> tuple[NetworkDevice, ...]:
    place = "own namespace" if namespace.own else f"namespace net:[{namespace.inode}]"
    try:
        sources = open_namespace(namespace, procfs=config.procfs, sysfs=config.sysfs, clock=clock)
    except NamespaceGone:
        return ()
    except NamespaceError as error:
        findings.append(Finding("network namespace", "problem", f"{place}: {one_line(error)}", privilege_remedy()))
        return ()
    return _devices(sources, place, findings)


def _devices(sources: DeviceSources, place: str, findings: list[Finding]) -> tuple[NetworkDevice, ...]:
    try:
        if sources.reason:
            findings.append(Finding("network namespace", "note", f"{place}: {sources.reason}"))
        try:
            return sources.inventory.read()
        except (OSError, ValueError) as error:
            what = f"{place}: the devices cannot be listed: {one_line(error)}"
            findings.append(Finding("network namespace", "problem", what, privilege_remedy()))
            return ()
    finally:
        sources.counters.close()
        sources.close()


def _finding(decision: RailDecision, rail: str, place: str, inside: str) -> Finding:
    """`place` names the device's namespace, `inside` is the prefix of a command in it."""
    device = decision.device
    what = f"{rail} is {device.name}{place} ({decision.reason})"
    if device.up is False:
        return Finding("rail", "problem", f"{what}: switched off", f"{inside}ip link set {device.name} up")
    if device.carrier is False:
        remedy = f"check its cable and the switch's port: {inside}ethtool {device.name}"
        return Finding("rail", "problem", f"{what}: no carrier", remedy)
    carrier = "connected" if device.carrier else "carrier unknown"
    speed = device.speed_bytes_per_second
    if speed is None:
        return Finding("rail", "note", f"{what}: {carrier}, speed unknown: its load has no percentage")
    return Finding("rail", "ok", f"{what}: {carrier}, {speed / 1e9:g} GB/s")


def _none(config: Config, decisions: tuple[RailDecision, ...]) -> Finding:
    seen = ", ".join(f"{decision.device.name} ({decision.reason})" for decision in decisions[:8]) or "no device at all"
    if config.rails:
        remedy = "correct --rail.devices: no device matches it"
    else:
        remedy = "name the devices: railscope agent --rail.devices NAME"
    return Finding("rail", "problem", f"none found; seen: {seen}", remedy)


def _report(decision: RailDecision, own: int) -> RailReport:
    device = decision.device
    return RailReport(
        device.netns,
        device.netns == own,
        device.name,
        decision.rail,
        decision.reason,
        device.kind,
        device.up,
        device.carrier,
        device.speed_bytes_per_second,
    )
