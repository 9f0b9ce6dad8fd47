"""The pool's state, which decides everything and touches nothing. See pool.py."""

from moonpool.master.state.generations import EPOCH_BITS
from moonpool.master.state.pool import PoolState

__all__ = ["EPOCH_BITS", "PoolState"]
