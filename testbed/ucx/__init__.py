"""The real UCX without a GPU and without RDMA: its benchmark from the wheel, over TCP."""
