"""A simulated libnvidia-ml.so.1: GPUs and NVLinks that a test scripts; see stub.c."""
