"""A pool in this process and Stores on it, for the tests of the facade."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from store_pool import MIB, LocalPool, patient_config

from moonpool.store import Store


class FacadePool(LocalPool):
    """A LocalPool that makes Stores and closes them."""

    def __init__(self, tmp_path: Path, dram_nbytes: int = 16 * MIB, num_nodes: int = 1, **rules: Any) -> None:
        super().__init__(tmp_path, dram_nbytes, num_nodes, **rules)
        self._stores = ExitStack()

    def store(self, **settings: Any) -> Store:
        settings.setdefault("config", patient_config())
        return self._stores.enter_context(Store(self.address, **settings))

    def close(self) -> None:
        if hasattr(self, "_stores"):
            self._stores.close()
        super().close()


def facade_pool(tmp_path: Path, **settings: Any) -> Iterator[FacadePool]:
    """Body of a fixture. Checks the pool's integrity at the end."""
    pool = FacadePool(tmp_path, **settings)
    try:
        yield pool
        pool.check_integrity()
    finally:
        pool.close()
