"""The condition of the node's hardware: PCIe links, network modules, and what the kernel's log says of both."""
