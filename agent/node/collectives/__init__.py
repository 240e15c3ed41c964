"""Calls, communicators and ranks: counts, identity, sequence, errors, stragglers."""
