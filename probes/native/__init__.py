"""Counters asked for at a steady beat, by a thread that needs no interpreter."""
