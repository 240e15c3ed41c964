"""Which processes map which NCCL, and whose jobs they are."""
