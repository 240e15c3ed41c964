"""Observes this host for a while and records everything: `railscope record`."""
