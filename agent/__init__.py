"""Interprets the facts that `probes` reads: counts, identity, rails, stalls, and analyses of recorded jobs."""
