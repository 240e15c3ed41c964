"""Metrics: the catalogue, their families, and the text and protobuf formats."""
