"""Network devices: which there are, what they counted, and when one appears, goes or loses its carrier.

`sources` opens what fits a network namespace and the agent's rights; `inventory`, `counters` and `events` are its
parts; `links`, `netlink` and `ethtool` are the kernel interfaces below them.
"""
