"""Facts: eBPF programs with their loaders and ring readers, NCCL's layouts, devices, processes, PCI topology."""
