"""Rings that BPF programs write and this process reads."""
