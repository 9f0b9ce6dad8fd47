"""Placement: which workers hold which prefixes, what a request costs at each worker, and the policies that choose."""
