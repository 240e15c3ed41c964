"""Synthesised sysfs trees: simulated machines, made by code, named by scenario."""
