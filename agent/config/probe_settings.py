"""Which probes the configuration asks for."""

from __future__ import annotations

from pathlib import Path

from railscope.agent.config.options import Config
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.programs.calls import EnqueueTime, Loader, ProgramSettings

AUTO = "auto"
"""The configuration's word for "the best that the kernel has"."""


def loader(config: Config) -> Loader | None:
    """Which library the configuration has load the BPF programs; None: bcc, where libbpf cannot."""
    return None if config.loader == AUTO else Loader(config.loader)


def attach_kind(config: Config) -> AttachKind | None:
    """How the configuration has probes attach; None: the best that the kernel has."""
    return None if config.probe_attach == AUTO else AttachKind(config.probe_attach)


def enqueue_time(config: Config) -> EnqueueTime | None:
    """How host time in calls is to be sampled; None: the best that the kernel has."""
    return None if config.probe_enqueue_time == AUTO else EnqueueTime(config.probe_enqueue_time)


def program_settings(config: Config) -> ProgramSettings:
    """How the agent loads its programs under this configuration."""
    namespaces = config.namespaces
    if config.scope == "netns" and not namespaces:
        namespaces = frozenset({Path("/proc/self/ns/net").stat().st_ino})
    return ProgramSettings(
        loader=loader(config),
        attach=attach_kind(config),
        enqueue_time=enqueue_time(config),
        sample_every=config.probe_sample_every,
        only_observed_processes=bool(config.pids or config.namespaces) or config.scope == "netns",
        namespaces=frozenset() if config.pids else namespaces,
        # Elsewhere, numbers may be those of another pid namespace than the kernel would look them up in.
        pids=config.pids if str(config.procfs) == "/proc" else (),
        ring_bytes=config.ring_bytes,
        aggregate_entries=config.aggregate_entries,
        communicator_entries=config.communicator_entries,
    )
