"""The flight recorder: the last minute at hand, written on a stall or a signal."""
