"""The records that BPF programs and this process share, as numpy dtypes."""
