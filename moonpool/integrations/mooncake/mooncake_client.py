"""`moonpool mooncake client`: a node that offers memory to the pool, as upstream's `mooncake_client` does."""

from __future__ import annotations

from moonpool.base.own_folder import OwnFolder
from moonpool.integrations.mooncake.client_flags import node_config
from moonpool.integrations.mooncake.flags import ParsedFlags
from moonpool.node.service import Node


class MooncakeClient:
    """A role (base/process.py). Raises ConfigError when a flag's value cannot be used."""

    def __init__(self, parsed: ParsedFlags) -> None:
        self._folder = OwnFolder("mp.client-")
        try:
            self._node = Node(node_config(parsed, str(self._folder.path)))
        except BaseException:
            self._folder.close()
            raise

    async def start(self) -> None:
        await self._node.start()

    async def close(self) -> None:
        """Take the memory back from the pool. Idempotent."""
        await self._node.close()
        self._folder.close()
