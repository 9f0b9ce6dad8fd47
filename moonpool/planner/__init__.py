"""Sizes a cluster and its pool for a trace: number of nodes, their split, pool size, with intervals. Pure."""
