"""Classifies communicators by kind of parallelism and infers the job's (p, t, d), without hints (composition).

What is looked at, in this order:

| Role        | How it shows                                                                                        |
|-------------|-----------------------------------------------------------------------------------------------------|
| `ep`        | AllToAll, or grouped Sends of everyone to everyone (`pipelines.is_exchange`)                        |
| `pp`        | Sends and Receives along a chain of GPUs                                                            |
| `embedding` | collectives of the two ends of one chain                                                            |
| `world`     | all GPUs, and nothing but control messages, or beside smaller groups that explain the job           |
| `tp`        | many collectives of one size in an iteration: at least three times as many as any group that shares |
|             | a GPU with it, at least two for each of the pipeline's messages, and of those messages' size        |
| `dp`        | few collectives in an iteration, of other sizes, or of Float32: gradients, and with sharded         |
|             | optimizers parameters                                                                               |

Every communicator that is tensor or data parallelism gets points for each sign (`_points`), and two points decide.
Where fewer speak for it, what the others are decides; where that does not, both readings are given as alternatives.
A group's name, where imported data has one, outweighs all signs.

Source: paper B, table 3 and section 3 (pattern); Megatron-LM's, PyTorch FSDP's and DDP's ways to call NCCL.

Frameworks name process groups.  PyTorch's flight recorder and its traces name groups: Megatron-LM's are
TENSOR_MODEL_PARALLEL_GROUP and the like, TorchTitan's and DeviceMesh's `mesh_tp`, `dp_shard`, …; `default_pg` or a bare
number says nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from railscope.agent.analysis.facts.report import Parallelism
from railscope.agent.analysis.parallelism.group_evidence import CommEvidence, find_evidence
from railscope.agent.analysis.parallelism.pipelines import (
    GRADIENT_BYTES,
    MOST_OF_AN_EMBEDDING,
    Pipelines,
    find_pipelines,
    is_exchange,
    reduces,
)
from railscope.agent.analysis.tables.calls import CountedCalls
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.facts.counted import format_count

_WORDS: Final = (
    ("embedding", ("embedding", "embd", "position_embedding")),
    ("dp", ("expert_data", "edp", "data_parallel", "data_model_parallel_replica", "fsdp", "dp", "dp_shard",
            "dp_replicate", "ddp", "hsdp", "zero")),
    ("ep", ("expert_model_parallel", "expert_parallel", "ep", "moe")),
    ("pp", ("pipeline", "pipeline_model_parallel", "pp")),
    ("tp", ("tensor", "tensor_model_parallel", "tp")),
)  # fmt: skip
"""Roles and the words that name them; the first that is found counts."""
_PATTERNS: Final = tuple(
    (role, re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(words, key=len, reverse=True))})(?![a-z])"))
    for role, words in _WORDS
)


def role_of_name(group_name: str) -> str:
    """The parallelism that a communicator's name tells: `tp`, `pp`, `dp`, `embedding`, `ep`, or an empty string."""
    name = group_name.lower().replace("-", "_")
    if "_and_" in name or ("tensor" in name and "data_parallel" in name):
        return ""  # several dimensions at once
    return next((role for role, pattern in _PATTERNS if pattern.search(name)), "")


TP, PP, DP, EMBEDDING, EP, WORLD, UNKNOWN = "tp", "pp", "dp", "embedding", "ep", "world", "unknown"
ROLES: Final = (TP, PP, DP, EMBEDDING, EP, WORLD, UNKNOWN)

_DECIDED: Final = 2
_NAMED: Final = 100
_FAR_MORE: Final = 3
"""Times as many collectives as in another group."""
_UNIFORM: Final = 0.8
"""Part of the calls that have one size, from which on a group sends one size."""
_MANY_CALLS: Final = 100
_SIZES_OF_SHARDS: Final = 8
"""Sharded layers have a few sizes; where there are more, they may be lengths of sequences."""
_CALLS_OF_LAYERS: Final = 16
"""Where nothing else speaks, so many collectives of one rank are taken for those of layers."""
_UNLIKE: Final = 0.01
"""Part of the calls of tensor groups, from which on two of them are of stages that differ."""


@dataclass(frozen=True, slots=True)
class Groups:
    """What the communicators of a job are."""

    roles: Mapping[str, str]
    """By communicator, one of `ROLES`; of every communicator."""
    parallelism: Parallelism | None
    """None: nothing that was recorded shows any."""
    pipelines: Pipelines
    evidence: tuple[CommEvidence, ...]

    def with_role(self, role: str) -> tuple[CommEvidence, ...]:
        """The communicators of a role, the largest first."""
        return tuple(one for one in self.evidence if self.roles[one.comm] == role)


def find_groups(calls: CountedCalls, gpus: Gpus) -> Groups:
    """Which parallelism each communicator serves, and the shape of the job."""
    evidence = find_evidence(calls, gpus)
    pipelines = find_pipelines(evidence)
    total = _total(evidence, pipelines, gpus)
    roles = {one.comm: UNKNOWN for one in gpus.communicators}
    reduced = []
    for one in evidence:
        named = role_of_name(one.communicator.group_name)
        role = _plain_role(one, pipelines, total)
        if named in (EP, PP, EMBEDDING):
            roles[one.comm] = named
        elif role is not None:
            roles[one.comm] = named or role
        elif one.collective_calls:
            reduced.append(one)
    decided, open_ones = _decide(reduced, pipelines, total)
    roles |= decided
    parallelism = _parallelism(evidence, roles, pipelines, open_ones, total)
    if parallelism is not None:
        parallelism = _with_doubt_of_several_jobs(parallelism, gpus)
    if open_ones and parallelism is not None:
        tensor = parallelism.tensor
        fixed = any(role == TP for role in decided.values())
        roles |= {one.comm: TP if not fixed and one.size == tensor > 1 else DP for one in open_ones}
    _inherit(evidence, roles)
    return Groups(roles, parallelism, pipelines, evidence)


def _total(evidence: Sequence[CommEvidence], pipelines: Pipelines, gpus: Gpus) -> int:
    """GPUs of the job, as many as are known of, those included that were not recorded."""
    sizes = [len(gpus.gpus), sum(map(len, pipelines.chains)), *(one.size for one in evidence)]
    partly: defaultdict[int, list[CommEvidence]] = defaultdict(list)
    for one in evidence:
        if one.ops and not one.communicator.complete:
            partly[one.size].append(one)
    for size, alike in partly.items():
        # Groups of one kind have no GPU in common, neither of those that were recorded nor of the others.
        if sum(len(one.gpus) for one in alike) == len(frozenset().union(*(one.gpus for one in alike))):
            sizes.append(size * len(alike))
    return max(sizes)


def _plain_role(one: CommEvidence, pipelines: Pipelines, total: int) -> str | None:
    """The role of a communicator that no points are needed for."""
    direct = one.sent_bytes + sum(one.ops[op].payload_bytes for op in ("AllToAll", "Recv") if op in one.ops)
    if direct > one.collective_bytes:
        if is_exchange(one):
            return EP
        on_chains = any(one.gpus & set(chain) for chain in pipelines.chains)
        return PP if on_chains else UNKNOWN
    if not one.collective_calls:
        return WORLD if one.size == total and one.control_calls else UNKNOWN
    chain = pipelines.chain_of(one.gpus)
    if chain is not None and len(one.gpus) > 1:
        ends = {chain[0], chain[-1]} <= one.gpus
        return EMBEDDING if ends and one.size <= MOST_OF_AN_EMBEDDING else UNKNOWN
    return None


def _decide(
    reduced: Sequence[CommEvidence], pipelines: Pipelines, total: int
) -> tuple[dict[str, str], tuple[CommEvidence, ...]]:
    """Roles of the communicators that are tensor or data parallelism, and those that could be either."""
    smaller = [one for one in reduced if one.size < total]
    roles: dict[str, str] = {}
    points = {one.comm: _points(one, smaller, pipelines) for one in smaller}
    for one in smaller:
        if abs(points[one.comm]) >= _DECIDED:
            roles[one.comm] = TP if points[one.comm] > 0 else DP
    changed = True
    while changed:
        changed = False
        for one in smaller:
            role = None if one.comm in roles else _role_by_others(one, smaller, roles)
            if role is not None:
                roles[one.comm] = role
                changed = True
    undecided = tuple(one for one in smaller if one.comm not in roles)
    for one in reduced:
        if one.size < total:
            continue
        if pipelines.chains or undecided or TP in roles.values():
            roles[one.comm] = WORLD
        elif roles:
            roles[one.comm] = DP
        elif abs(found := _points(one, reduced, pipelines)) >= _DECIDED:
            roles[one.comm] = TP if found > 0 else DP
        else:
            undecided += (one,)
    return roles, undecided


def _role_by_others(one: CommEvidence, among: Iterable[CommEvidence], roles: Mapping[str, str]) -> str | None:
    """Decide the rest: one that shares a GPU with a tensor group is none, and one like other tensor groups is one."""
    meets: set[str] = set()
    like: set[str] = set()
    for other in among:
        role = roles.get(other.comm)
        if role is None or other.gpus == one.gpus:
            continue
        if other.gpus & one.gpus:
            meets.add(role)
        elif other.size == one.size:
            like.add(role)
    if TP in meets:
        return DP
    like -= meets
    return like.pop() if len(like) == 1 else None


def _points(one: CommEvidence, among: Iterable[CommEvidence], pipelines: Pipelines) -> int:
    """Signs for tensor parallelism, less those for data parallelism."""
    named = role_of_name(one.communicator.group_name)
    if named in (TP, DP):
        return _NAMED if named == TP else -_NAMED
    common = one.common_collective
    if common is None:
        return 0
    uniform = common.common_calls >= _UNIFORM * common.calls
    points = 0
    link_calls = max((pipelines.calls.get(gpu, 0) for gpu in one.gpus), default=0)
    if link_calls:
        # With sequence parallelism, or where a stage hands on 1/t of its activations, one is the other's t-th part.
        size = pipelines.message_bytes
        points += 3 if uniform and common.common_bytes in (size, size * one.size) else -2
        ratio = one.collective_calls / link_calls
        points += 2 if ratio >= 2 else -2 if ratio <= 1 else 0
    reductions = [one.ops[op] for op in ("AllReduce", "ReduceScatter") if op in one.ops]
    wide = 2 * sum(each.wide_calls for each in reductions) > sum(each.calls for each in reductions)
    if wide:
        points -= 3
    if not uniform and common.largest_bytes >= GRADIENT_BYTES:
        points -= 1
    if "ReduceScatter" in one.ops and "AllReduce" not in one.ops and 1 < common.sizes <= _SIZES_OF_SHARDS:
        points -= 2  # layers and embeddings in turn: fully sharded data parallelism
    others = [other for other in among if other.gpus & one.gpus and other.gpus != one.gpus]
    calls = one.collective_calls
    if common.largest_bytes <= GRADIENT_BYTES and calls >= _MANY_CALLS:
        # The gradients of a small model, in few buckets an iteration, look the same where no other group is beside it.
        points += 2 if others or wide else 1
    if any(_FAR_MORE * calls <= other.collective_calls for other in others):
        points -= 3
    elif others and all(calls >= _FAR_MORE * other.collective_calls for other in others):
        points += 3
    if any(_is_sharded(one, other) for other in others):
        points -= 6
    return points


def _is_sharded(one: CommEvidence, other: CommEvidence) -> bool:
    """Whether the other group reduces, shard by shard, what this one has scattered: hybrid sharded data parallelism."""
    scattered, reduced = one.ops.get("ReduceScatter"), other.ops.get("AllReduce")
    if scattered is None or reduced is None or "AllReduce" in one.ops:
        return False
    return (scattered.calls * other.callers, scattered.common_bytes, scattered.sizes) == (
        reduced.calls * one.callers,
        reduced.common_bytes,
        reduced.sizes,
    )


def _parallelism(
    evidence: Sequence[CommEvidence],
    roles: Mapping[str, str],
    pipelines: Pipelines,
    undecided: Sequence[CommEvidence],
    total: int,
) -> Parallelism | None:
    by_role: defaultdict[str, list[CommEvidence]] = defaultdict(list)
    for one in evidence:
        by_role[roles[one.comm]].append(one)
    if not (undecided or any(by_role[role] for role in (TP, PP, DP, EP)) or pipelines.chains):
        return None
    doubts = [*_doubts(by_role, pipelines, total)]
    pipeline = max((len(chain) for chain in pipelines.chains), default=1)
    fixed = sorted({one.size for one in by_role[TP]})
    if fixed:
        tensors = fixed[-1:]
    else:
        # The likeliest first: what calls most is rather tensor than data parallelism.
        busiest = max((one.collective_calls for one in undecided), default=0)
        sizes = sorted({one.size for one in undecided if one.collective_calls == busiest})
        sizes += sorted({one.size for one in undecided} - set(sizes))
        tensors = [*sizes, 1] if busiest >= _CALLS_OF_LAYERS else [1, *sizes]
    shapes = [
        (pipeline, tensor, total // (pipeline * tensor)) for tensor in tensors if total % (pipeline * tensor) == 0
    ]
    if not shapes:
        shapes = [(pipeline, tensors[0], max(total // (pipeline * tensors[0]), 1))]
        doubts.append(f"{total} GPUs are not a multiple of {pipeline} stages × {tensors[0]} tensor ranks")
    data_sizes = sorted({one.size for one in by_role[DP]})
    expert = max((one.size for one in by_role[EP]), default=1)
    if data_sizes and shapes[0][2] % data_sizes[-1]:
        doubts.append(f"groups of {data_sizes[-1]} reduce gradients, and {shapes[0][2]} replicas would be needed")
    elif data_sizes and data_sizes[-1] != shapes[0][2] and len(data_sizes) == 1 and expert == 1:
        doubts.append(f"there are {shapes[0][2]} replicas, and gradients are reduced in groups of {data_sizes[-1]}")
    alternatives = tuple(shapes[1:])
    if alternatives:
        doubts.append(
            "collectives of one group could be of activations or of gradients, so it could also be "
            + _format_shapes(alternatives)
        )
    other_length, doubt = _other_length(evidence, by_role, pipelines)
    if other_length:
        others = tuple(
            (other_length, tensor, total // (other_length * tensor))
            for _, tensor, _ in shapes
            if total % (other_length * tensor) == 0
        )
        alternatives += others
        doubts.append(f"{doubt}, so it could also be {_format_shapes(others)}" if others else doubt)
    reason = "; ".join(doubts) if doubts else _reason(by_role, pipelines)
    return Parallelism(*shapes[0], expert, certain=not doubts, reason=reason, alternatives=alternatives)


def _format_shapes(shapes: Iterable[tuple[int, int, int]]) -> str:
    return " or ".join(f"p={p}, t={t}, d={d}" for p, t, d in shapes)


def _other_length(
    evidence: Sequence[CommEvidence], by_role: Mapping[str, list[CommEvidence]], pipelines: Pipelines
) -> tuple[int, str]:
    """How many stages there are if the Sends are read the other way, and why they may be; 0: they cannot be."""
    if pipelines.denied:
        length = max(len(chain) for chain in pipelines.denied)
        return length, f"chains of {length} GPUs send along, and reduce gradients together, as stages never do"
    if any(not _are_stages(chain, evidence, by_role) for chain in pipelines.two_way_pairs):
        return 1, "two GPUs that send to each other may be two stages, or share sequences or experts"
    return 0, ""


def _are_stages(
    pair: tuple[int, ...], evidence: Sequence[CommEvidence], by_role: Mapping[str, list[CommEvidence]]
) -> bool:
    """Whether two GPUs that send to each other show to hold different parameters.

    They do if one reduces gradients without the other, and no others but those of an embedding with it; or if their
    tensor groups make other numbers of calls, as embedding and loss are on one stage only.
    """
    for one in evidence:
        if (
            one.gpus.issuperset(pair)
            and reduces(one)
            and (one.size > MOST_OF_AN_EMBEDDING or "ReduceScatter" in one.ops)
        ):
            return False
    if any(len(one.gpus.intersection(pair)) == 1 for one in by_role.get(DP, ())):
        return True
    calls = [[one.collective_calls for one in by_role.get(TP, ()) if gpu in one.gpus] for gpu in pair]
    return all(calls) and abs(sum(calls[0]) - sum(calls[1])) > _UNLIKE * max(sum(calls[0]), sum(calls[1]))


def _doubts(by_role: Mapping[str, list[CommEvidence]], pipelines: Pipelines, total: int) -> Iterable[str]:
    lengths = sorted({len(chain) for chain in pipelines.chains})
    if pipelines.tangled:
        yield "some GPUs send to each other along no chain"
    if len(lengths) > 1:
        yield f"pipelines have {' and '.join(map(str, lengths))} stages"
    if lengths and sum(len(chain) for chain in pipelines.chains) != total:
        yield f"pipelines hold {sum(len(chain) for chain in pipelines.chains)} of {total} GPUs"
    partly = sum(bool(one.ops) and not one.communicator.complete for group in by_role.values() for one in group)
    if partly:
        yield f"not all ranks of {format_count(partly, 'communicator')} were recorded"
    tensor_sizes = sorted({one.size for one in by_role.get(TP, ())})
    if len(tensor_sizes) > 1:
        yield f"tensor groups have {' and '.join(map(str, tensor_sizes))} ranks"
    members = {one.gpus for one in by_role.get(TP, ())}
    held = frozenset().union(*members)
    if tensor_sizes and (len(held) != total or sum(map(len, members)) != total):
        yield f"tensor groups overlap, or hold only {len(held)} of {total} GPUs"


def _with_doubt_of_several_jobs(found: Parallelism, gpus: Gpus) -> Parallelism:
    """The shape, less certain if GPUs share no communicator, and uncertain if such groups use the same GPUs."""
    groups = gpus.connected_groups()
    if len(groups) < 2:
        return found
    # Only the GPUs of one job have its communicators in common; one after the other, jobs use the same GPUs.
    members = [[gpus.gpus[place] for place in group] for group in groups]
    places = [{(gpu.server, gpu.gpu) for gpu in own if gpu.gpu} for own in members]
    reused = len(set().union(*places)) < sum(map(len, places))
    doubt = f"{len(groups)} groups of GPUs share no communicator" + (
        ", and some of these are the same GPUs: jobs one after the other, or one restarted, of fewer GPUs each"
        if reused
        else ": they may be several jobs"
    )
    reason = f"{found.reason.rstrip('.')}; {doubt}" if not reused or not found.certain else doubt
    return replace(found, certain=found.certain and not reused, reason=reason)


def _reason(by_role: Mapping[str, list[CommEvidence]], pipelines: Pipelines) -> str:
    said = []
    if pipelines.chains:
        chains = format_count(len(pipelines.chains), "chain")
        said.append(f"Sends and Receives run along {chains} of {len(pipelines.chains[0])} GPUs")
    for role, what in (
        (TP, "activations are reduced, or gathered and scattered, by"),
        (DP, "gradients are reduced by"),
        (EP, "everyone sends to everyone in"),
    ):
        sizes = Counter(one.size for one in by_role.get(role, ()))
        groups = [f"{format_count(number, 'group')} of {size}" for size, number in sorted(sizes.items(), reverse=True)]
        if groups:
            said.append(f"{what} {' and '.join(groups)}")
    if not by_role.get(DP):
        said.append("no group reduces gradients")
    return "; ".join(said)


def _inherit(evidence: Iterable[CommEvidence], roles: dict[str, str]) -> None:
    """A communicator without evidence that has the members of another is for the same."""
    by_members: defaultdict[frozenset[int], set[str]] = defaultdict(set)
    for one in evidence:
        if roles[one.comm] in (TP, DP, EP):
            by_members[one.gpus].add(roles[one.comm])
    for one in evidence:
        found = by_members[one.gpus]
        if roles[one.comm] == UNKNOWN and not one.ops and len(found) == 1:
            roles[one.comm] = next(iter(found))
