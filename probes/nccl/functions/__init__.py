"""Which functions of NCCL and CUDA are probed, and at which instruction."""
