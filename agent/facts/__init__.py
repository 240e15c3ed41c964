"""Facts that several rooms share: the snapshot, stalls, rails' decisions, clocks, names."""
