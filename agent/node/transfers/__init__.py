"""Transfers of libraries other than NCCL (UCX, NIXL, MPI, …): which files are probed, and what processes did."""
