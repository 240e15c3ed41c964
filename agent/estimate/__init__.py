"""What a job of a given shape sends, where, and how long it takes: `railscope estimate`."""
