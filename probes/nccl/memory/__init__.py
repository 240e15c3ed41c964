"""What NCCL's own memory tells, read from outside without a probe."""
