"""Dashboards, rules and runbooks: what people look at, kept as code."""
