"""`mooncake.buffer_pool`, served by Moonpool's pool."""

from moonpool.integrations.mooncake.buffer_pool import BufferPool, RegisteredBufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
