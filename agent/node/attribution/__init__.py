"""Where a rail's port bytes came from, and how many of them collectives explain."""
