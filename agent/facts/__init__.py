"""Facts that several rooms share: the snapshot, stalls and the order of their causes, decisions on rails, clocks."""
