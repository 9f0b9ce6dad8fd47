"""LMCache's second tier on the pool: a plug-in of its type `native_plugin` (docs/lmcache.md). LMCache is not imported.

--l2-adapter '{"type": "native_plugin", "module_path": "moonpool.integrations.lmcache",
               "class_name": "LmcacheConnector", "adapter_params": {"master": "tcp:10.0.0.1:7700"}}'
"""

from __future__ import annotations

from moonpool.integrations.lmcache.connector import LmcacheConnector
from moonpool.integrations.lmcache.settings import LmcacheSettings

__all__ = ["LmcacheConnector", "LmcacheSettings"]
