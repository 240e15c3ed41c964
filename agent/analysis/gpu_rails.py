"""Which rail of the fabric a GPU uses.

It is the number of the network device that carries all its recorded connections, if every GPU has one; otherwise its
place among the GPUs of its server, by index where indices are known, if all servers have as many: on a rail-optimised
fabric every GPU has a NIC of its own, and the NICs of the same place meet at the same leaf switch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from agent.analysis.report_facts import GpuFacts


def rails_of(gpus: Sequence[GpuFacts]) -> tuple[str, ...] | None:
    """The rail of each GPU, or None where it cannot be told."""
    if gpus and all(gpu.rail for gpu in gpus):
        return tuple(gpu.rail for gpu in gpus)
    by_server: defaultdict[str, list[GpuFacts]] = defaultdict(list)
    for gpu in gpus:
        by_server[gpu.server].append(gpu)
    if len({len(own) for own in by_server.values()}) != 1:
        return None
    place: dict[int, str] = {}
    for own in by_server.values():
        indices = {gpu.gpu for gpu in own}
        numbered = len(indices) == len(own) and all(index.isdecimal() for index in indices)
        ordered = sorted(own, key=lambda gpu: (int(gpu.gpu) if numbered else 0, gpu.number))
        place |= {gpu.number: str(position) for position, gpu in enumerate(ordered)}
    return tuple(place[gpu.number] for gpu in gpus)


def rail_basis(gpus: Sequence[GpuFacts], rails: tuple[str, ...] | None) -> str:
    """How the rails were told, as a sentence to add to another."""
    if rails is None or not rails:
        return ""
    if all(gpu.rail for gpu in gpus):
        return "  A GPU's rail is the network device that all its recorded connections use."
    return "  A GPU's rail is its place on its server."
