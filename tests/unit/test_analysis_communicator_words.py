"""What communicators are said to carry: who sends to whom in pipelines, and what the rest moves (simulated)."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.analysis.facts.report import CommunicatorUse, OpUse, PeerLink
from railscope.agent.analysis.parallelism.composition import find_composition
from railscope.agent.analysis.report.communicator_words import describe_calls, select_communicators
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.report import report_of
from railscope.agent.analysis.report.text import as_text
from railscope.agent.analysis.report.words import summarise
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.ops import find_communicators
from railscope.agent.dataset.reader import Dataset
from railscope.agent.model.mapping import default_mapping
from tests.unit.datasets import JobDataset, gpt_job
from tests.unit.model_shapes import GPT_3B

MIB = 1 << 20
SENDS = (OpUse("Recv", "Float16", 2, 2 * MIB), OpUse("Send", "Float16", 2, 2 * MIB))


def told(dataset: Dataset) -> dict[str, CommunicatorUse]:
    gpus = find_gpus(dataset)
    counted = count_calls(dataset)
    return {use.comm: use for use in find_communicators(counted, gpus, find_composition(dataset, gpus, counted)[1])}


def of_links(*links: tuple[int | None, int | None, int], role: str = "pp") -> str:
    found = tuple(PeerLink(source, destination, 1, moved) for source, destination, moved in links)
    gpus = tuple(sorted({end for link in links for end in link[:2] if end is not None}))
    return describe_calls(CommunicatorUse("c", 4, gpus, role, 4, 2 * MIB, SENDS, found))


def test_a_pipeline_is_said_as_the_chain_of_its_stages_with_what_goes_each_way(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, GPT_3B, default_mapping(GPT_3B), 8)
    report = report_of(job.open())
    uses = {use.comm: use for use in report.communicators}
    assert describe_calls(uses["pp0"]) == "pipeline Send/Recv 0 ⇄ 8 ⇄ 16 ⇄ 24, 1,000 MiB each way"
    assert uses["pp0"].links[:2] == (PeerLink(0, 8, 8, 1000 * MIB), PeerLink(8, 0, 8, 1000 * MIB))
    assert uses["pp0"].payload_bytes == 6 * 1000 * MIB
    assert describe_calls(uses["tp0"]) == describe_calls(uses["dp0"]) == "AllReduce"
    assert describe_calls(uses["world"]) == "–"
    assert "pipeline Send/Recv 0 ⇄ 8 ⇄ 16 ⇄ 24, 1,000 MiB each way" in html_text(report)


def test_both_ends_sends_and_receives_count_once_in_what_a_communicator_moves(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("pp", (0, 1))
    for _ in range(3):
        job.call("pp", 0, "Send", MIB, peer=1)
        job.call("pp", 1, "Recv", MIB, peer=0)
    dataset = job.open()
    use = told(dataset)["pp"]
    assert (use.calls, use.payload_bytes, use.links) == (6, 3 * MIB, (PeerLink(0, 1, 3, 3 * MIB),))
    report = report_of(dataset)
    assert "pipeline Send/Recv 0 → 1, 3 MiB one way" in as_text(report)
    said = "They made 6 calls of 3 MiB payload in 1 communicator; most bytes are Send of Float16 (100 %)."
    assert said in summarise(report)


@pytest.mark.parametrize("silent", [0, 1])
def test_one_recorded_end_tells_of_a_link(tmp_path: Path, silent: int) -> None:
    job = JobDataset(tmp_path, servers=(1, 1), silent_servers=frozenset({silent}))
    job.communicator("pp", (0, 1))
    for rank, op in ((0, "Send"), (1, "Recv")):
        job.call("pp", rank, op, MIB, peer=1 - rank)
    assert describe_calls(told(job.open())["pp"]) == f"pipeline Send/Recv {('– → 0', '0 → –')[silent]}, 1 MiB one way"


def test_an_exchange_is_all_to_all_and_no_list_of_links(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(4, 4))
    job.communicator("ep", range(8))
    for source in range(8):
        for destination in range(8):
            if source != destination:
                job.call("ep", source, "Send", MIB + source, peer=destination)
                job.call("ep", destination, "Recv", MIB + source, peer=source)
    use = told(job.open())["ep"]
    assert (describe_calls(use), use.links) == ("Send/Recv, all to all", ())


def test_chains_in_other_forms() -> None:
    assert of_links((0, 1, 5), (1, 0, 5), (1, 2, 5), (2, 1, 5), (2, 0, 5), (0, 2, 5)) == (
        "pipeline Send/Recv 0 ⇄ 1 ⇄ 2 ⇄ 0, 5 B each way"
    )
    assert of_links((0, 4, 5), (1, 5, 5), (2, 6, 5), (3, 7, 5)) == (
        "pipeline Send/Recv 0 → 4, 1 → 5 and 2 more, 5 B one way"
    )
    assert of_links((4, 0, 5), (0, 4, 9)) == "pipeline Send/Recv 4 ⇄ 0, 5 B to 9 B each way"
    assert of_links((0, 1, 5), (0, 2, 5), (0, 3, 5), role="unknown") == "Send/Recv over 3 links, 5 B each"
    assert of_links((1, 0, 5), role="unknown") == "Send/Recv 1 → 0, 5 B one way"
    assert of_links((0, 0, 5), role="unknown") == "Send/Recv over 1 link, 5 B each"
    stages = [(stage, stage + 1, 5) for stage in range(15)]
    assert of_links(*stages) == "pipeline Send/Recv 0 → 1 → 2 → 3 → 4 → 5 … → 15, 5 B one way"


def test_of_many_communicators_every_role_is_shown() -> None:
    uses = [CommunicatorUse(str(place), 2, (0, 1), role, 1, 1, SENDS) for place, role in enumerate(["tp"] * 9 + ["pp"])]
    assert [use.comm for use in select_communicators(uses, 4)] == ["0", "1", "2", "9"]
    assert select_communicators(uses, 10) == uses
    assert [use.comm for use in select_communicators(uses, 1)] == ["0"]


def test_what_moves_most_counts() -> None:
    reduce = OpUse("AllReduce", "Float16", 1, 5 * MIB)
    assert describe_calls(CommunicatorUse("c", 2, (0, 1), "tp", 5, 7 * MIB, (reduce, *SENDS))) == "AllReduce"
    assert describe_calls(CommunicatorUse("c", 2, (0, 1), "pp", 5, 7 * MIB, SENDS)) == "Send/Recv"
