"""GPUs and their NVLinks, as NVIDIA's management library (NVML) tells of them."""
