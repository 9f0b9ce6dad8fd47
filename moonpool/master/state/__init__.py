"""The pool's state, which decides everything and touches nothing. See pool.py."""

from moonpool.master.state.pool import PoolState
from moonpool.master.state.space import EPOCH_BITS

__all__ = ["EPOCH_BITS", "PoolState"]
