"""Fleets of simulated nodes behind real servers of the monitoring stack."""
