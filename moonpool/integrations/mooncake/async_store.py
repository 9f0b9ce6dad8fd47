"""`MooncakeDistributedStoreAsync`: every call of the store also as `async_<call>`, for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from moonpool.integrations.mooncake.store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """`await store.async_get(key)` is get(key) on a thread of the event loop's executor. A cancelled call ends in the
    background: registered memory that it was given stays in use until then.
    """

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(type(self), name.removeprefix("async_"), None) if name.startswith("async_") else None
        if not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        async def run_in_thread(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(call, self, *args, **kwargs)

        return functools.wraps(call)(run_in_thread)
