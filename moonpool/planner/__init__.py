"""Sizes a cluster and its pool for a trace: number of nodes, their split, pool size, with intervals. Pure."""

GOAL = 0.95  # default share of requests that should meet both targets
