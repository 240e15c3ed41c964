"""Getting BPF programs into the kernel: two loaders, attachment, maps, and what one hit costs."""
