"""Where GPUs and network cards sit in a machine: its PCI tree, and NCCL's description of it."""
