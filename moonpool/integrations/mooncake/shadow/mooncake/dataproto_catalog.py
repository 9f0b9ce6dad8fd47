"""`mooncake.dataproto_catalog`, which needs no pool."""

from moonpool.integrations.mooncake.batch_catalog import DataProtoCatalog

__all__ = ["DataProtoCatalog"]
