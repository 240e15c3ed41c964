"""An observer in a pid namespace of its own, as in a pod with one: processes are those that it sees, by its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nccl.library import REPOSITORY

pytestmark = pytest.mark.root

OBSERVER = """
import json, sys
from pathlib import Path
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.records.calls import Stat
from tests.root.probe_targets import FLOAT32, all_reduce, attached, communicators, loaded, target
with target(Path(sys.argv[1]), Layouts.load()) as to, loaded(to) as programs, attached(programs, to):
    comm, buffer = to.caller.new_communicator(), to.caller.memory(4096)
    assert all_reduce(to, 3, comm) == 0
    to.caller.call_from_threads("ncclAllReduce", 1, 2, buffer, buffer, 100, FLOAT32, 0, comm, 7)
    events = programs.call_events.read()
    keys, _ = programs.communicators.read()
    told = {
        "pid": to.caller.pid,
        "tgids": events["tgid"].tolist(),
        "tids": events["tid"].tolist(),
        "keys": keys["tgid"].tolist(),
        "foreign": programs.stats()[Stat.FOREIGN_PID_NAMESPACE],
    }
print(json.dumps(told))
"""


def test_processes_and_threads_have_the_numbers_of_the_observers_namespace(testbed_library: Path) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", OBSERVER]
    done = subprocess.run([*command, testbed_library], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["pid"] < 100, "the namespace begins to count anew"
    assert told["tgids"] == [told["pid"]] * 5
    assert told["keys"] == [told["pid"]]
    assert told["tids"][:3] == [told["pid"]] * 3
    assert set(told["tids"][3:]).isdisjoint({told["pid"]})
    assert max(told["tids"]) < 100
    assert told["foreign"] == 0
