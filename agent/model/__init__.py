"""What a GPT-shaped training job should send: the analytical model, without input or output.

shape → parameters → volumes (what a rank hands to NCCL) → mapping, traffic (which pairs of ranks carry it) → nodes
(what of it leaves them) → times.  Source: *Understanding Communication Characteristics of Distributed Training*
(APNet 2024), with the corrections that each module names.
"""
