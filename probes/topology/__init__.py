"""The PCI topology of a machine, from sysfs and from NCCL's description of it."""
