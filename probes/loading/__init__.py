"""Loads BPF programs into the kernel: two loaders, attachment, maps, and the cost of one hit."""
