"""`MooncakeDistributedStore`: upstream's class on Moonpool's pool. Its calls are in the classes it is made of.
`MooncakeDistributedStoreAsync` has every call also as `async_<call>`, for asyncio.

What a caller may rely on: 0 or a byte count is success, a negative number is an ErrorCode; a put on a key that is taken
returns 0 and the old value stays; whatever an exist or a look-up found is leased; only registered memory is touched;
bytes that fail their checksum are never a success. Thread-safe; every call has a deadline. Before setup() and after
close() calls return -600, {} or b"".
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from moonpool.integrations.mooncake.client_kinds import ClientKindCalls
from moonpool.integrations.mooncake.parallel_tensors import ParallelTensorCalls
from moonpool.integrations.mooncake.pointers import PointerCalls
from moonpool.integrations.mooncake.safetensors_files import SafetensorsCalls
from moonpool.integrations.mooncake.segments_api import SegmentCalls
from moonpool.integrations.mooncake.sessions_api import SessionCalls
from moonpool.integrations.mooncake.tasks import TaskCalls
from moonpool.integrations.mooncake.values import ValueCalls


class MooncakeDistributedStore(
    ParallelTensorCalls,
    SafetensorsCalls,
    ValueCalls,
    PointerCalls,
    SessionCalls,
    TaskCalls,
    SegmentCalls,
    ClientKindCalls,
):
    """A client of the pool from setup() to close()."""


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
