"""Real transfers of libraries other than NCCL, on namespace hosts: a disaggregated inference that moves KV caches."""
