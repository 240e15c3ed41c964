"""Processes as /proc shows them: what they map, their state, memory, sockets, namespaces and end."""
