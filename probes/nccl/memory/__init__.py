"""Reads NCCL's own memory from outside, without a probe."""
