"""`mooncake.async_store`, served by Moonpool's pool."""

from moonpool.integrations.mooncake.async_store import MooncakeDistributedStoreAsync

__all__ = ["MooncakeDistributedStoreAsync"]
