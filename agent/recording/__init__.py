"""The format of a flight recording: its arrays, how its file is read and written, its summary."""
