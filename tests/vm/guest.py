"""What tests/vm runs inside a virtual machine: each part is a program of its own, which says what it saw.

    python3 -m tests.vm.guest

The result is one JSON object: the kernel's release, and by part its exit status, what it printed (facts as JSON) and
its errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.vm.machine import RESULT_PORT

PARTS: Final = {
    "probes": ("tests.vm.guest_probes",),
    "doctor": ("railscope.agent.cli.main", "doctor", "--json"),
    "nccl": ("tests.vm.guest_nccl",),
    "rdma": ("tests.vm.guest_rdma",),
    "owners": ("tests.vm.guest_owners",),
    "nfs": ("tests.vm.guest_nfs",),
}


def main() -> None:
    parts = {}
    for name, module in PARTS.items():
        done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True)
        parts[name] = {"status": done.returncode, "printed": done.stdout, "errors": done.stderr}
    Path(RESULT_PORT).write_text(json.dumps({"release": os.uname().release, "parts": parts}) + "\n")


if __name__ == "__main__":
    main()
