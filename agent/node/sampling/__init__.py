"""Counters read at a beat: totals that never fall, rates that keep bursts."""
