"""A flight recording: its arrays, its file, its summary."""
