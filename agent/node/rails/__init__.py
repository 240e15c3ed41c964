"""Which devices are rails, and what their counters and links tell."""
