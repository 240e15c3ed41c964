"""Computes what the NVLinks of each GPU did between two scrapes, summed over a GPU's links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from railscope.exporters.top.counter_delta import increased_errors, per_second
from railscope.exporters.top.scraped import NodeScrape, ScrapedNvlink


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU and its NVLinks."""

    gpu: str
    name: str
    links: int
    """That it has and that are known one by one."""
    links_up: int | None
    """Of those, active or asleep; None: the GPU does not say."""
    speed_bytes_per_second: float | None
    """One direction, all links together, those that are down included."""
    transmit_bytes_per_second: float | None
    receive_bytes_per_second: float | None
    new_errors: tuple[tuple[str, int], ...]
    """What grew between the scrapes, by how much, as `crc_link3`; the most first."""
    past_errors: tuple[tuple[str, int], ...]
    """What grew since the first scrape, and not between the last two."""
    unhealthy: tuple[str, ...]
    """Complaints in the health of its NVLink fabric."""

    @property
    def links_down(self) -> int | None:
        return None if self.links_up is None else self.links - self.links_up


def make_gpu_views(
    before: NodeScrape | None, now: NodeScrape, span_seconds: float | None, first: NodeScrape | None
) -> tuple[GpuView, ...]:
    """What `railscope top` shows of every GPU that has NVLinks; errors are remembered from `first` on."""
    views = []
    for gpu in dict.fromkeys(key[0] for key in now.nvlinks):
        links, old, oldest = _of_gpu(now, gpu), _of_gpu(before, gpu), _of_gpu(first, gpu)
        new_errors = increased_errors(_errors(old), _errors(links) or {})
        shown = {name for name, _ in new_errors}
        past_errors = increased_errors(_errors(oldest), _errors(links) or {})
        states = [one.up for one in links.values() if one.up is not None]
        views.append(
            GpuView(
                gpu=gpu,
                name=now.gpu_names.get(gpu, ""),
                links=sum(one.single for one in links.values()),
                links_up=sum(states) if states else None,
                speed_bytes_per_second=now.nvlink_speeds.get(gpu),
                transmit_bytes_per_second=_sum(
                    per_second(old[link].transmit_bytes if link in old else None, one.transmit_bytes, span_seconds)
                    for link, one in links.items()
                    if one.transmit_bytes is not None
                ),
                receive_bytes_per_second=_sum(
                    per_second(old[link].receive_bytes if link in old else None, one.receive_bytes, span_seconds)
                    for link, one in links.items()
                    if one.receive_bytes is not None
                ),
                new_errors=new_errors,
                past_errors=tuple(one for one in past_errors if one[0] not in shown),
                unhealthy=now.gpu_complaints.get(gpu, ()),
            )
        )
    return tuple(views)


def _of_gpu(scrape: NodeScrape | None, gpu: str) -> dict[str, ScrapedNvlink]:
    return {} if scrape is None else {key[1]: link for key, link in scrape.nvlinks.items() if key[0] == gpu}


def _errors(links: Mapping[str, ScrapedNvlink]) -> dict[str, float] | None:
    """Of all links of a GPU by name; None: the GPU was not there."""
    if not links:
        return None
    return {
        f"{kind}_link{link.link}" if link.single else kind: count
        for link in links.values()
        for kind, count in link.errors.items()
    }


def _sum(values: Iterable[float | None]) -> float | None:
    """None where there is nothing, or where a part is not known: a sum would be too small."""
    known = list(values)
    return sum(one for one in known if one is not None) if known and None not in known else None
