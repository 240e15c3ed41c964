"""The stacks of blamed ranks, put to the findings that blame them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from railscope.agent.cluster.fleet.facts import Agent
from railscope.agent.cluster.fleet.stacks import AgentAnswer, RankStack
from railscope.agent.cluster.verdict.finding import Finding, Verdict
from railscope.agent.cluster.verdict.names import format_hosts


def hosts_to_ask(verdict: Verdict, agents: Iterable[Agent]) -> dict[str, str]:
    """Addresses of the agents on hosts of blamed ranks, by host; of stalls that go on."""
    wanted = {host for finding in verdict.findings if _blames_ranks(finding) for host in finding.hosts}
    return {agent.host: agent.address for agent in agents if agent.host in wanted and agent.address}


def with_stacks(verdict: Verdict, answers: Mapping[str, AgentAnswer]) -> Verdict:
    """The verdict, with what agents said of the ranks that its findings blame; and of which nothing was said, why."""
    return replace(verdict, findings=tuple(_with_stacks(finding, answers) for finding in verdict.findings))


def _blames_ranks(finding: Finding) -> bool:
    return finding.now and bool(finding.ranks) and not finding.devices


def _with_stacks(finding: Finding, answers: Mapping[str, AgentAnswer]) -> Finding:
    if not _blames_ranks(finding):
        return finding
    stacks: dict[tuple[str, int], RankStack] = {}
    for host in finding.hosts:
        for stack in answers[host].stacks if host in answers else ():
            if stack.comm == finding.comm and str(stack.rank) in finding.ranks:
                stacks[stack.host, stack.rank] = stack
    told = {str(stack.rank) for stack in stacks.values() if stack.lines}
    unknown = [
        f"where the code of rank {stack.rank} stands: {stack.why}" for stack in stacks.values() if not stack.lines
    ]
    troubles = [
        f"{host}: {answers[host].trouble}" for host in finding.hosts if host in answers and answers[host].trouble
    ]
    unknown += [f"where code of blamed ranks stands: {trouble}" for trouble in troubles]
    if not told and not unknown:
        agents = f"the agents of {format_hosts(finding.hosts)}" if finding.hosts else "agents"
        unknown.append(f"where the code of blamed ranks stands: {agents} have no stack of it (--stall.stacks)")
    return replace(
        finding,
        stacks=tuple(stack for _, stack in sorted(stacks.items()) if stack.lines),
        unknown=(*finding.unknown, *unknown),
    )
