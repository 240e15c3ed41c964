"""Real libraries other than NCCL that transfer, between namespace hosts."""
