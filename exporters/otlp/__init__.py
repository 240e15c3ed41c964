"""Pushes what a scrape would show to an OpenTelemetry collector: names, messages, the sending process, its thread."""
