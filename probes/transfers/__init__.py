"""Libraries other than NCCL that move bytes (UCX, NIXL, MPI, …), from outside: their functions, and what those did."""
