"""The pool's state, which decides everything and touches nothing. See pool.py."""

from moonpool.store.state.generations import EPOCH_BITS
from moonpool.store.state.pool import PoolState

__all__ = ["EPOCH_BITS", "PoolState"]
