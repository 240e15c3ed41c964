"""The alerting rules for Prometheus as code: what fires, for how long it must hold, what it says and what to read."""
