"""Latency, iterations, overlap and bandwidth of recorded operations."""
