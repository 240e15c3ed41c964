"""The flight recorder: keeps the last minute, and writes it to disk on a stall or a signal."""
