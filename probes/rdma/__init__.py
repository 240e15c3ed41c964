"""RDMA devices: what they are and what they count.

`inventory` reads devices and ports from sysfs; `counters` reads all counters of all ports, from kept descriptors or,
where one request fetches a whole group, over `netlink`; `widths` knows where each counter ends; `attributes` reads
one sysfs file without ever waiting for it.
"""
