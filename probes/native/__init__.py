"""Reads counters periodically in a native thread that needs no interpreter."""
