"""`MooncakeDistributedStore`: upstream's class on Moonpool's pool, one base class per concern.

What a caller may count on: 0 or a byte count is success, a negative number is an ErrorCode; a put on a key that is
taken returns 0 and the old value stays; whatever an exist or a look-up found is leased; only registered memory is
touched; bytes that fail their checksum are never a success. Thread-safe; every call has a deadline. Before setup()
and after close() calls answer -600, {} or b"".
"""

from __future__ import annotations

from moonpool.integrations.mooncake.buffers import BufferMethods
from moonpool.integrations.mooncake.replicas import ReplicaMethods
from moonpool.integrations.mooncake.values import ValueMethods


class MooncakeDistributedStore(ValueMethods, BufferMethods, ReplicaMethods):
    """A client of the pool from setup() to close()."""
