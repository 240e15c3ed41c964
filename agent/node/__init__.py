"""The daemon of one host."""
