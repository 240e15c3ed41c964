"""The NCCL probes on kernels that are not this machine's: each way to attach counts every call, or says why not."""

from __future__ import annotations

import pytest

from tests.vm.conftest import BOOT_SECONDS, Seen
from tests.vm.guest_probes import CALLS, ELEMENTS

pytestmark = [pytest.mark.vm, pytest.mark.timeout(BOOT_SECONDS + 60)]

UPROBE_MULTI = (6, 6)


def has_multi(seen: Seen) -> bool:
    return seen.kernel >= UPROBE_MULTI


def test_every_call_is_counted_once_in_every_way_that_the_kernel_has(seen: Seen) -> None:
    exact = {
        "result": 0,
        "ops": ["AllReduce"],
        "calls": CALLS,
        "payload_bytes": CALLS * ELEMENTS * 4,
        "events": CALLS,
    }
    expected = {"perf+off": {**exact, "timed": 0}, "perf+pair": {**exact, "timed": CALLS}}
    if has_multi(seen):
        expected |= {"multi+off": {**exact, "timed": 0}, "multi+pair": {**exact, "timed": CALLS}}
    else:
        expected["multi"] = {"refused": "this kernel has no such links"}
    assert seen["probes"]["ways"] == expected


@pytest.mark.parametrize("programs", ["internals", "transfers"])
def test_the_kernel_takes_the_probes_below_the_entry_points_and_on_other_libraries(seen: Seen, programs: str) -> None:
    kinds = ["multi", "perf"] if has_multi(seen) else ["perf"]
    assert seen["probes"][programs] == {kind: {"refused": None} for kind in kinds}


def test_the_doctor_finds_no_problem_and_names_what_the_agent_uses(seen: Seen) -> None:
    found = seen["doctor"]
    assert found["ok"]
    by_check = {finding["check"]: finding for finding in found["findings"]}
    expected = {"uprobe_multi": has_multi(seen), "uprobe_multi pair": has_multi(seen), "uprobe session": False}
    for check, works in {**expected, "perf event uprobes": True}.items():
        assert by_check[check]["status"] == ("ok" if works else "note"), by_check[check]
    assert f"uses {'uprobe_multi' if has_multi(seen) else 'perf event'} links" in by_check["probes"]["what"]
