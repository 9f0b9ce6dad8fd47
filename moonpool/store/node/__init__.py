"""A machine's part of the pool: a process that owns memory and perhaps disk space, serves both, keeps them mounted at
the master, and does there what the master orders. `Node` (service.py) puts the parts together.
"""

from moonpool.store.node.config import NodeConfig
from moonpool.store.node.service import Node

__all__ = ["Node", "NodeConfig"]
