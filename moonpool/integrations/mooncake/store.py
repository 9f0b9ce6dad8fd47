"""`MooncakeDistributedStore`: upstream's class on Moonpool's pool. Its calls are in the classes it is made of.

What a caller may rely on: 0 or a byte count is success, a negative number is an ErrorCode; a put on a key that is taken
returns 0 and the old value stays; whatever an exist or a look-up found is leased; only registered memory is touched;
bytes that fail their checksum are never a success. Thread-safe; every call has a deadline. Before setup() and after
close() calls return -600, {} or b"".
"""

from __future__ import annotations

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
