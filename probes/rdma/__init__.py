"""RDMA devices: inventory and counters.

`inventory` reads devices and ports from sysfs; `counters` reads all counters of all ports, each `port` file by file,
all together from `kept_files` or, where one request fetches a whole group, over `netlink`; `widths` knows where each
counter ends.
"""
