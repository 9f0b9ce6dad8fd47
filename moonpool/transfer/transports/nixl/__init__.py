"""RDMA, RoCE, EFA and NVLink through NIXL and UCX; an optional extra."""
