"""Metrics: their families, and the text and protobuf formats."""
