"""`moonpool mooncake master`: our master at upstream's port, with its admin HTTP server and its metadata server."""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

from moonpool.base.address import host_port
from moonpool.base.own_folder import OwnFolder
from moonpool.base.rpc import Call
from moonpool.integrations.mooncake.http_metadata import MetadataStore
from moonpool.integrations.mooncake.http_service import HttpService
from moonpool.integrations.mooncake.master_admin import MasterAdmin
from moonpool.integrations.mooncake.master_flags import MooncakeMasterConfig
from moonpool.master.calls import handlers
from moonpool.master.service import Master

_LOG = logging.getLogger(__name__)


class MooncakeMaster:
    """A role (base/process.py). Without a data folder of its own, the master forgets its objects when it ends."""

    def __init__(self, config: MooncakeMasterConfig) -> None:
        self._config = config
        self._folder = None if config.data_dir else OwnFolder("mp.master-")
        self.master = Master(config.master(config.data_dir or (str(self._folder.path) if self._folder else "")))
        self._services: list[HttpService] = []
        self.admin_port = 0
        self.metadata_port: int | None = None

    async def start(self) -> str:
        """Raise ConfigError when an address cannot be used, and what Master.start() raises."""
        config = self._config
        address = await self.master.start()
        answers = handlers(self.master.pool)
        no_peer: Any = None  # only calls about connections use the peer, and none of them is asked here

        def ask(call: Call[Any]) -> Any:
            return answers[type(call)](call, no_peer)

        self.admin_port = await self._listen(MasterAdmin(ask).service(), "admin", config.admin_host, config.admin_port)
        if config.metadata_port is not None:
            service = MetadataStore().service()
            self.metadata_port = await self._listen(service, "metadata", config.metadata_host, config.metadata_port)
        return address

    async def wait(self) -> None:
        await self.master.wait()

    async def close(self) -> None:
        """Idempotent."""
        for service in self._services:
            await service.close()
        await self.master.close()
        if self._folder is not None:
            self._folder.close()

    async def _listen(self, service: HttpService, what: str, host: str, port: int) -> int:
        self._services.append(service)
        listening = await service.listen(host, port)
        _LOG.info("the %s HTTP server listens on %s", what, host_port(host, listening))
        if not _is_loopback(host):
            _LOG.warning("anyone who can connect to %s can use it; there is no password", host_port(host, listening))
        return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
