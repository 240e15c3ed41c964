"""The command line: one entry a command, its options, the demo."""
