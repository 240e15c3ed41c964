"""The real NCCL without a GPU: its library from the wheel, and a stand-in for CUDA that plays its kernels."""
