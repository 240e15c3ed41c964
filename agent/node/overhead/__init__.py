"""What the probes cost the jobs, and how much is observed for it."""
