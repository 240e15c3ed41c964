"""What is stuck in a cluster, and why: `railscope diagnose`."""
