"""`mooncake.async_store`, served by Moonpool's pool."""

from moonpool.integrations.mooncake.store import MooncakeDistributedStoreAsync

__all__ = ["MooncakeDistributedStoreAsync"]
