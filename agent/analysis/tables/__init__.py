"""Recorded tables as expressions: calls, GPUs, size classes, intervals, what is missing."""
