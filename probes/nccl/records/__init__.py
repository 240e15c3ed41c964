"""What BPF programs and this process share, as numpy dtypes."""
