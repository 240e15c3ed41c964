"""What a report holds: its measurements as facts, and the options that choose among them."""
