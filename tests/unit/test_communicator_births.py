"""Whether a communicator was seen from its first call on.  The kernel's events are simulated."""

from __future__ import annotations

import numpy as np
import pytest

from agent.communicators import Communicators
from probes.nccl.records import COMMUNICATOR, COMMUNICATOR_KEY, LIFECYCLE_EVENT, LifecycleKind
from tests.unit.collectives_kernel import SimulatedTable


@pytest.mark.parametrize(
    ("kinds", "whole"),
    [
        ((LifecycleKind.INIT,), True),
        ((LifecycleKind.INIT, LifecycleKind.CONFIRMED), True),
        ((LifecycleKind.SPLIT,), True),
        ((LifecycleKind.SEEN,), False),
        ((LifecycleKind.SEEN, LifecycleKind.CONFIRMED), False),
        ((LifecycleKind.SEEN, LifecycleKind.DESTROY), False),
    ],
    ids=lambda value: "-".join(kind.name for kind in value) if isinstance(value, tuple) else str(value),
)
def test_only_what_was_seen_to_be_made_is_whole(kinds: tuple[LifecycleKind, ...], whole: bool) -> None:
    communicators = Communicators(SimulatedTable(COMMUNICATOR_KEY, COMMUNICATOR), lambda _tgid: "2.27.3")
    for kind in kinds:
        event = np.zeros(1, LIFECYCLE_EVENT)
        event["instance"], event["tgid"], event["kind"] = 7, 4711, kind
        communicators.take(event)
    known = communicators.get(7)
    assert known is not None
    assert known.whole is whole
