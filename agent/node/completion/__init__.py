"""When operations were complete, and what was handed to which rail: the levels beyond counts."""
