"""GPUs and their NVLinks, through NVIDIA's management library (NVML)."""
