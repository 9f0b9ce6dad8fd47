"""A node: one machine's part of the pool. It owns memory and perhaps disk space, serves both, keeps them mounted at the
master, and carries out the master's orders. `Node` (service.py) puts the parts together.
"""
