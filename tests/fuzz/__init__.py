"""Coverage-guided fuzzing of what strangers write: `make fuzz`."""
