"""Bytes between each pair of GPUs, beside what the model predicts: `railscope matrix`."""
