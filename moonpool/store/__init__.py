"""The pool: objects under keys, in memory that nodes offer, placed and remembered by one master. No torch needed.

with Store("tcp:10.0.0.1:7700") as store:
    store.put("answer", b"42")
    store.get("answer")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.store.store import Store

__all__ = ["Store"]


def __getattr__(name: str) -> object:
    """Store when it is asked for: those who want one module of this package do not load all of it."""
    if name == "Store":
        from moonpool.store.store import Store

        return Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
