"""`python -m tests.stack.block_size`: what a sample of railscope's takes on Prometheus' disk, measured.

Real agents beside a real job are scraped every second by a real Prometheus, and then its samples are written as a block
(the administrative call `snapshot`).  Samples cost what their chunks take; every series of a block costs its part of
the index besides, once for all its samples.  dashboards/cost.py holds the result.

Source: https://prometheus.io/docs/prometheus/latest/querying/api/#snapshot and the block's own meta.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from railscope.testbed.job import Job, JobOptions
from tests.stack.stack import Pace, Stack


@dataclass(frozen=True, slots=True)
class BlockSize:
    """One block."""

    series: int
    samples: int
    chunk_bytes: int
    index_bytes: int

    @property
    def bytes_per_sample(self) -> float:
        return self.chunk_bytes / self.samples

    @property
    def index_bytes_per_series(self) -> float:
        return self.index_bytes / self.series


def block_size(block: Path) -> BlockSize:
    """Read a block's folder."""
    stats = json.loads((block / "meta.json").read_text())["stats"]
    chunks = sum(file.stat().st_size for file in (block / "chunks").iterdir())
    return BlockSize(stats["numSeries"], stats["numSamples"], chunks, (block / "index").stat().st_size)


def measure(seconds: float) -> BlockSize:
    """Run everything for so long."""
    load = JobOptions(pattern="ddp", seconds=24 * 3600, batch=1_000_000_000, linger=True, pace_us=50_000)
    with Stack(pace=Pace("1s"), prometheus=["--web.enable-admin-api"]) as stack, Job(stack.fabric.hosts, load):
        time.sleep(seconds)
        stack.check()
        call = urllib.request.Request(f"{stack.prometheus_url}/api/v1/admin/tsdb/snapshot", method="POST")
        with urllib.request.urlopen(call, timeout=60) as answer:
            name = json.load(answer)["data"]["name"]
        (block,) = [one for one in (stack.folder / "prometheus/snapshots" / name).iterdir() if one.is_dir()]
        return block_size(block)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stack.block_size", description=__doc__)
    parser.add_argument("--seconds", type=float, default=150, metavar="N", help="how long (default: 150)")
    found = measure(parser.parse_args().seconds)
    print(found)
    print(f"{found.bytes_per_sample:.2f} bytes a sample, {found.index_bytes_per_series:.0f} bytes of index a series")
    return 0


if __name__ == "__main__":
    sys.exit(main())
