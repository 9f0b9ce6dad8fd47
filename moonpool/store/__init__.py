"""The pool: objects under keys, in the memory of nodes. One master places them and tracks them. No torch needed.

with Store("tcp:10.0.0.1:7700") as store:
    store.put("answer", b"42")
    store.get("answer")

MasterDirectory lets transfer engines find each other's segments by name through the master (docs/transfer.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.store.master_directory import MasterDirectory
    from moonpool.store.store import Store

__all__ = ["MasterDirectory", "Store"]


def __getattr__(name: str) -> object:
    """Import a class when it is first used, so that importing one module of this package does not load all of it."""
    if name == "Store":
        from moonpool.store.store import Store

        return Store
    if name == "MasterDirectory":
        from moonpool.store.master_directory import MasterDirectory

        return MasterDirectory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
