"""What tests of the monitoring stack share: how its servers run."""

from __future__ import annotations

import os

# Go collects garbage when the heap has doubled, a fifth of what promtool takes of a processor.
os.environ.setdefault("GOGC", "400")
