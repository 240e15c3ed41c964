"""`railscope diagnose` and the recording rule put the same cause first, whatever two hosts say."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import pytest
import yaml

from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.facts.causes import CAUSES, HELD, Cause, Tier, tier_of
from railscope.dashboards.evidence import FILE, RULE, Ground, ranked_causes, render_expression, replace_rule
from tests.stack.prometheus import tool
from tests.unit.fleets import Fleets, stall

OF_HOSTS = tuple(cause for cause, facts in CAUSES.items() if facts.by_host)
OF_RANKS = tuple(cause for cause in OF_HOSTS if cause is not Cause.TRANSFER_STUCK)
"""A transfer of another library has no communicator, in which other causes could be."""
ENTERED = 1205
"""Operations that the ranks of the made-up fleets have entered; a rank that is behind entered one less."""
OF_A_RANK = 'job="r",instance="{rank}:1",comm="{comm}",rank="{rank}"'


def test_the_rule_is_made_of_the_table() -> None:
    text = FILE.read_text()
    assert replace_rule(text) == text, "run 'python -m railscope.dashboards.evidence'"
    assert text.count(f"record: {RULE}\n") == 1
    assert all(f'cause="{cause}"' in render_expression() for cause in OF_HOSTS if cause is not Cause.UNKNOWN)


def test_tiers_and_the_order_of_the_table_agree() -> None:
    tiers = [CAUSES[cause].tier for cause in Cause]
    assert tiers == sorted(tiers)
    assert list(CAUSES) == list(Cause)
    assert tier_of("some_new_cause") is Tier.UNKNOWN
    assert tier_of(Cause.RANK_BEHIND, by_sequence=True) < CAUSES[Cause.GPU_NOT_PROGRESSING].tier
    numbers = [grade for grade, _, _ in ranked_causes()]
    assert numbers == list(range(len(OF_HOSTS) + 2, 0, -1))


def test_what_is_seen_by_itself_is_better_evidence_than_what_follows_from_signs() -> None:
    by_tier = [
        {cause for cause in Cause if CAUSES[cause].tier is tier} for tier in (Tier.PLAIN, Tier.SHAPES, Tier.RAIL)
    ]
    assert by_tier == [
        {Cause.PROCESS_GONE, Cause.PROCESS_STOPPED, Cause.PROCESS_FROZEN, Cause.RAIL_DOWN},
        {Cause.RANKS_DISAGREE},
        {Cause.RAIL_MTU, Cause.RAIL_FILTERED, Cause.RAIL_LOSSY, Cause.RAIL_SLOW},
    ]


def first_of_diagnose(said: tuple[Cause, Cause], *, behind: bool, named: bool) -> str:
    """The cause that diagnose names first."""
    fleet = Fleets().communicator()
    if behind:
        fleet.behind(1)
    for rank, cause in enumerate(said):
        fleet.rank(rank, stall=stall(cause, blamed_rank=_blamed(cause, rank, named=named)))
    return make_verdict(fleet.made()).findings[0].cause


def _blamed(cause: Cause, rank: int, *, named: bool) -> str:
    """Whom a host blames: of `rank_behind` the other rank, if it names one; of a GPU its own."""
    if cause is Cause.RANK_BEHIND:
        return str(1 - rank) if named else ""
    return str(rank) if cause is Cause.GPU_NOT_PROGRESSING else ""


@pytest.mark.stack
def test_both_put_the_same_cause_first_for_every_pair_of_causes(tmp_path: Path) -> None:
    tests = []
    # One for each: promtool takes no query over so many samples as all of them have.
    for behind, named in product((False, True), (False, True)):
        series, expected = _pairs(behind=behind, named=named)
        tests.append(
            {
                "interval": "15s",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": f"topk by (comm) (1, {RULE})", "eval_time": "1m", "exp_samples": expected}
                ],
            }
        )
    test = {"rule_files": [str(FILE)], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "pairs.yml").write_text(yaml.safe_dump(test))
    command = [tool("promtool"), "test", "rules", str(tmp_path / "pairs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


def _pairs(*, behind: bool, named: bool) -> tuple[list[dict[str, str]], list[dict[str, object]]]:
    """Two hosts that say each pair of causes, and what of it comes first."""
    series: list[dict[str, str]] = []
    expected: list[dict[str, object]] = []
    of_grade = {(cause, ground): grade for grade, cause, ground in ranked_causes()}
    for number, said in enumerate(product(OF_RANKS, OF_RANKS)):
        if HELD.issuperset(said):
            continue  # all of its ranks: the job is suspended, which is no stall
        comm = f"{number:016x}"
        for rank, cause in enumerate(said):
            labels = OF_A_RANK.format(rank=rank, comm=comm)
            blamed = _blamed(cause, rank, named=named)
            values = {
                f'railscope_comm_stalled{{{labels},op="AllReduce",cause="{cause}"}}': 1,
                f'railscope_comm_stall_info{{{labels},cause="{cause}",blamed_rank="{blamed}"}}': 1,
                f"railscope_comm_enqueued_total{{{labels}}}": ENTERED - (behind and rank == 1),
                f"railscope_comm_completed_total{{{labels}}}": ENTERED - 1,
            }
            series += [{"series": name, "values": f"{value}x8"} for name, value in values.items()]
        first = Cause(first_of_diagnose(said, behind=behind, named=named))
        ground = Ground.SAID
        if first is Cause.RANK_BEHIND:
            ground = Ground.SEQUENCE if behind else Ground.NAMED
        elif first is Cause.UNKNOWN and Cause.RANK_BEHIND in said:
            # Nobody can be named, or each names the other: the rule keeps the word of the hosts that wait.
            first, ground = Cause.RANK_BEHIND, Ground.NAMED if named else Ground.SAID
        labels = f'{{comm="{comm}",cause="{first}"}}'
        expected.append({"labels": RULE + labels, "value": of_grade[first, ground]})
    return series, expected
