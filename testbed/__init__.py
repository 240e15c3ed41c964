"""A fabric to watch, on any Linux machine: namespace hosts with rails, and a collective job that uses them."""
