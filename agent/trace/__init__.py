"""A recording as a trace for Perfetto: `railscope export`."""
