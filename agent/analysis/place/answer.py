"""What `railscope place` finds in a dataset: how the job is laid out, what would be better, which links it needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from railscope.agent.analysis.facts.report import GpuFacts, Parallelism
from railscope.agent.analysis.parallelism.groups import find_groups
from railscope.agent.analysis.place.demands import find_demands
from railscope.agent.analysis.place.grid import find_mapping
from railscope.agent.analysis.place.leaves import LeafSource, Leaves, find_leaves
from railscope.agent.analysis.place.link_demand import LinkAnswer, find_link_demand
from railscope.agent.analysis.place.placement import LinkRates, RankedMapping, rank_mappings
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import Gpus, find_gpus
from railscope.agent.analysis.tables.leaf_map import LeafMap
from railscope.agent.analysis.tables.missing_calls import missing_calls_of
from railscope.agent.analysis.traffic.gpu_rails import Link, Rails, find_rails, links_of_servers
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count


class PlacementError(ValueError):
    """This job cannot be placed; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """What is asked."""

    gpus_per_server: int | None
    """None: as recorded."""
    epsilon: float
    network_share: float
    nic_bytes_per_second: float | None
    """None: what was recorded of rails."""
    nvlink_bytes_per_second: float | None
    leaf_map: LeafMap | None = None
    """As the user says it; None: as the rails heard, or as is assumed."""


@dataclass(frozen=True, slots=True)
class PlaceAnswer:
    """What was found."""

    gpus: tuple[GpuFacts, ...]
    gpus_per_server: int
    parallelism: Parallelism | None
    doubts: tuple[str, ...]
    """Why the evidence is ambiguous, one sentence each; none: it is not."""
    mappings: tuple[RankedMapping, ...]
    """The best first."""
    rates: LinkRates
    rails_known: bool
    """Whether bytes across rails mean something."""
    leaves: Leaves | None
    """The leaf switch of each link; None: nothing is known of links."""
    links: LinkAnswer | None
    """None: nothing can be said of links."""
    no_links: str
    """Why not, the end of a sentence; empty: there is an answer."""
    link_doubts: tuple[str, ...]
    """What the answer assumes of rails."""
    losses: tuple[str, ...]
    """Calls that are missing in the recording, one sentence each: bytes are too small by them."""


def find_placement(dataset: Dataset, request: PlaceRequest) -> PlaceAnswer:
    """How the ranks of a dataset's job are placed on servers, and how they could better be.

    Raises:
        PlacementError: there is nothing to place, or it does not fill servers.
        ConfigError: the leaf map lacks a server or a rail.
    """
    gpus, counted = find_gpus(dataset), count_calls(dataset)
    if not gpus.gpus or not len(counted):
        raise PlacementError("no call of a communicator was recorded: record while the job runs")
    groups = find_groups(counted, gpus)
    traffic, _ = find_traffic(dataset, gpus, counted)
    rails = find_rails(dataset, gpus.gpus, traffic.pairs)
    size, places = _places(gpus.gpus, request.gpus_per_server, rails)
    mapping = find_mapping(groups, gpus)
    links_of_gpus = _links_of(gpus.gpus, rails)
    rail_rates, link_doubts, any_rail = _rail_rates(dataset, gpus, links_of_gpus)
    nic = request.nic_bytes_per_second or (float(min(rail_rates.values())) if rail_rates else None)
    rates = LinkRates(nic, request.nvlink_bytes_per_second)
    no_links = _no_links(gpus, rails, any_rail or request.nic_bytes_per_second is not None)
    leaves = _find_leaves(dataset, request, gpus.gpus, rails, {*links_of_gpus, *rail_rates}, links_of_gpus)
    return PlaceAnswer(
        gpus=gpus.gpus,
        gpus_per_server=size,
        parallelism=groups.parallelism,
        doubts=tuple(_doubts(groups.parallelism, mapping is not None, traffic.unobserved_wire_bytes, rails)),
        mappings=rank_mappings(
            mapping, find_demands(counted, gpus, groups), places, size, rates, _by_place(places, links_of_gpus, leaves)
        ),
        rates=rates,
        rails_known=rails.of_gpu is not None,
        leaves=leaves,
        links=None
        if no_links
        else find_link_demand(
            traffic.pairs,
            links_of_gpus,
            rail_rates or dict.fromkeys(links_of_gpus, 1),
            request.epsilon,
            request.network_share,
            None if leaves is None else leaves.of_link,
        ),
        no_links=no_links,
        link_doubts=() if no_links else tuple(filter(None, (rails.assumption, *link_doubts))),
        losses=missing_calls_of(dataset),
    )


def _find_leaves(
    dataset: Dataset,
    request: PlaceRequest,
    gpus: Sequence[GpuFacts],
    rails: Rails,
    links: Collection[Link],
    used: Sequence[Link],
) -> Leaves | None:
    """None: neither a GPU's rail nor its server tells its leaf switch."""
    given = request.leaf_map
    if rails.of_gpu is None and (given is None or given.by_rail):
        return None
    servers = Counter(gpu.server for gpu in gpus)
    as_recorded = request.gpus_per_server is None or set(servers.values()) == {request.gpus_per_server}
    return find_leaves(dataset, links, used, given, as_recorded=as_recorded)


def _by_place(places: Sequence[int], links: Sequence[Link], leaves: Leaves | None) -> list[int] | None:
    """By place, which one GPU each has, a number that stands for its leaf switch; None: each rail has its own."""
    if leaves is None or leaves.source is LeafSource.ASSUMED:
        return None
    numbers: dict[str, int] = {}
    found = [0] * len(places)
    for place, link in zip(places, links, strict=True):
        found[place] = numbers.setdefault(leaves.of_link[link], len(numbers))
    return found


def _no_links(gpus: Gpus, rails: Rails, any_link: bool) -> str:
    """Why links cannot be analysed; empty: they can."""
    if len({gpu.server for gpu in gpus.gpus}) < 2:
        return "only one server was recorded; the load of links elsewhere is unknown"
    if rails.of_gpu is None:
        return f"the rail of a GPU is unknown: {rails.doubt}"
    return "" if any_link else "no rail was recorded: if the servers have NICs, give their rate with --c-nic"


def _doubts(parallelism: Parallelism | None, gridded: bool, unobserved_bytes: int, rails: Rails) -> Iterable[str]:
    if parallelism is None:
        yield "no communicator shows a kind of parallelism"
    elif not parallelism.certain:
        yield parallelism.reason
    if parallelism is not None and not gridded:
        yield "the groups form no grid of stages, replicas and tensor ranks, so other mappings cannot be tried"
    if unobserved_bytes:
        yield "some ranks were not recorded, and traffic to and from them is in no figure"
    if rails.of_gpu is None:
        yield "the rails of GPUs are unknown: mappings are ranked as if each GPU had its own NIC"


def _places(gpus: Sequence[GpuFacts], asked: int | None, told: Rails) -> tuple[int, tuple[int, ...]]:
    """GPUs of a server, and by GPU its place: server × GPUs of a server + place in the server."""
    servers: defaultdict[str, list[GpuFacts]] = defaultdict(list)
    for gpu in gpus:
        servers[gpu.server].append(gpu)
    sizes = sorted({len(members) for members in servers.values()})
    if asked is not None and sizes != [asked]:
        if len(gpus) % asked:
            raise PlacementError(
                f"{format_count(len(gpus), 'GPU')} cannot fill servers of {asked}: choose a divisor of {len(gpus)}"
            )
        return asked, tuple(range(len(gpus)))
    if len(sizes) > 1:
        raise PlacementError(
            f"servers have {' and '.join(map(str, sizes))} GPUs of the job: choose one number with --gpus-per-node"
        )
    rails = told.of_gpu
    places = [0] * len(gpus)
    for server, members in enumerate(servers.values()):
        own = [rails[gpu.number] for gpu in members] if rails else []
        fitting = len(set(own)) == len(members) and all(rail.isdecimal() and int(rail) < sizes[0] for rail in own)
        for index, gpu in enumerate(members):
            places[gpu.number] = server * sizes[0] + (int(own[index]) if fitting else index)
    return sizes[0], tuple(places)


def _links_of(gpus: Sequence[GpuFacts], rails: Rails) -> list[Link]:
    """By GPU the link that it sends over."""
    return [(gpu.server, rails.of_gpu[gpu.number] if rails.of_gpu else "0") for gpu in gpus]


def _rail_rates(dataset: Dataset, gpus: Gpus, used: Sequence[Link]) -> tuple[Mapping[Link, int], tuple[str, ...], bool]:
    """The rate of every link of the job's servers, what had to be assumed, and whether any of their rails was recorded.

    No rates: no speeds are known.
    """
    described = dataset["rails"].select("node", "netns", "rail", "speed_bytes_per_second").distinct()
    rows = dataset.rows(described).to_pylist()
    found = links_of_servers(rows, {gpu.server for gpu in gpus.gpus})
    rates: dict[Link, int] = {}
    for link, place in found:
        speed = rows[place]["speed_bytes_per_second"]
        if speed:
            rates[link] = min(rates.get(link, speed), speed)
    if set(used) <= set(rates):
        return rates, (), bool(found)
    lacking = "the recorded rails are not numbered as the GPUs' rails are" if rates else "no rail's speed was recorded"
    return {}, (f"one link a GPU, all alike: {lacking}",), bool(found)
