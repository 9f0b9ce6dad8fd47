"""The master's process: one PoolState behind calls, with its journal, its orders to nodes, its events and metrics."""

from moonpool.store.master.service import Master, MasterConfig

__all__ = ["Master", "MasterConfig"]
