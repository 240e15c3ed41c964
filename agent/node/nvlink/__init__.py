"""GPUs and NVLinks, through NVML."""
