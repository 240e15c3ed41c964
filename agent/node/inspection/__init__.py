"""What tenants control is read by processes that may be killed: the daemon asks, and never waits long."""
