"""`ClientKindCalls`: upstream's other ways to set a store up, and what belongs to them.

Upstream's dummy client reaches the pool through a `mooncake_client` process of its machine. Here every client reaches
the pool's memory itself, so a dummy client is a store that offers no memory.
"""

from __future__ import annotations

import logging
import os

from moonpool.base.errors import ConfigError
from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.host_memory import MemoryPool
from moonpool.integrations.mooncake.setup_config import split_host

_LOG = logging.getLogger(__name__)
_MASTER_PORT = 50051
_INIT_ALL_HOSTNAME = "localhost:12345"  # upstream's, like the next two
_INIT_ALL_METADATA = "127.0.0.1:2379"
_INIT_ALL_BUFFER_NBYTES = 1 << 30


class ClientKindCalls(StoreBase):
    def __init__(self) -> None:
        super().__init__()
        self._mem_pool: MemoryPool | None = None

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect to the pool without offering memory, and register `mem_pool_size` bytes for alloc_from_mem_pool().

        The master is MOONCAKE_MASTER; without it, port 50051 of the server's host, else `server_address` itself.
        """
        try:
            if mem_pool_size < 0 or local_buffer_size < 0:
                raise ConfigError("sizes are not below 0")
            host, _ = split_host(server_address)
            pool = MemoryPool(mem_pool_size) if mem_pool_size else None
        except (ConfigError, OSError, OverflowError) as error:
            _LOG.error("setup_dummy: %s", error)
            return ErrorCode.INVALID_PARAMS
        named = os.environ.get("MOONCAKE_MASTER")
        masters = [named] if named else [f"{host}:{_MASTER_PORT}", server_address]
        code: int = ErrorCode.INVALID_PARAMS
        for master in masters:
            code = self.setup("localhost", "P2PHANDSHAKE", 0, local_buffer_size, "tcp", "", master)
            if code == ErrorCode.OK:
                break
        if code == ErrorCode.OK and pool is not None:
            code = self.register_buffer(pool.address, pool.nbytes)
            self._mem_pool = pool
        return code

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16 * 1024 * 1024) -> int:
        """setup() with upstream's fixed settings: as localhost:12345, with the master on 127.0.0.1:50051."""
        master = f"127.0.0.1:{_MASTER_PORT}"
        settings = (mount_segment_size, _INIT_ALL_BUFFER_NBYTES, protocol, device_name, master)
        return self.setup(_INIT_ALL_HOSTNAME, _INIT_ALL_METADATA, *settings)

    def alloc_from_mem_pool(self, size: int) -> int:
        """Return the address of `size` registered bytes of setup_dummy()'s memory, which stay given out until close().
        Return 0 when there is no room, or the store was set up otherwise.
        """
        pool = self._mem_pool
        return 0 if pool is None or self._session is None else pool.alloc(size)

    def get_offload_rpc_read_count(self) -> int:
        """Return how many whole values this store has read from SSDs."""
        return self.counters().get("disk_reads", 0)

    def close(self) -> int:
        code = super().close()
        self._mem_pool = None
        return code
