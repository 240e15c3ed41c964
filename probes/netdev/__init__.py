"""Network devices: inventory, counters, and events of links.

`sources` opens what fits a network namespace and the agent's rights; `inventory`, `counters` and `events` are its
parts; `links`, `netlink` and `ethtool` are the kernel interfaces below them.
"""
