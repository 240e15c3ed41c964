"""Facts that several rooms share: the snapshot, the catalogue of metrics, stalls, the table of causes, clocks."""
