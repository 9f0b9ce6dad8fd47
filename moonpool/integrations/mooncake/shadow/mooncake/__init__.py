"""Stands where upstream's `mooncake` package would, for whoever put this folder on PYTHONPATH."""

from moonpool.integrations.mooncake.buffer_pool import BufferPool, RegisteredBufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
