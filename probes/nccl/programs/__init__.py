"""The BPF programs on NCCL and CUDA, loaded: attach them, read what they wrote."""
