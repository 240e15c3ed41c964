"""What a recorded job did: pattern, overhead, model and placement, computed from datasets (agent/dataset).

`report` puts the parts together; each part is a module of its own that answers one question from the tables.
"""
