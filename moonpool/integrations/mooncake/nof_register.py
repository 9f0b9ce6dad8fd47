"""`MooncakeDistributedNoFRegister`: upstream's registration of NVMe-over-fabrics drives, of which the pool has none."""

from __future__ import annotations

import logging

from moonpool.integrations.mooncake.codes import ErrorCode

_LOG = logging.getLogger(__name__)


class MooncakeDistributedNoFRegister:
    """Every call is refused: the pool's disks belong to nodes, which serve them (`moonpool node --ssd`)."""

    def real_register(
        self,
        nqn: str = "",
        nsid: int = 1,
        traddr: str = "",
        trsvcid: int = 4420,
        base: int = 0,
        size: int = 1024,
        master_server_addr: str = "127.0.0.1:50051",
    ) -> int:
        """Return -1012 (NOT_SUPPORTED)."""
        return _refuse(nqn)

    def real_unregister_by_endpoint(
        self,
        nqn: str = "",
        nsid: int = 1,
        traddr: str = "",
        trsvcid: int = 4420,
        master_server_addr: str = "127.0.0.1:50051",
    ) -> int:
        """Return -1012 (NOT_SUPPORTED)."""
        return _refuse(nqn)


def _refuse(nqn: str) -> int:
    _LOG.error("drive %r: the pool uses disks of its nodes only (moonpool node --ssd)", nqn)
    return ErrorCode.NOT_SUPPORTED
