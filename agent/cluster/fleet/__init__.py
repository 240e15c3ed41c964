"""What a Prometheus-compatible store knows of the agents, ranks and rails of a fleet."""
