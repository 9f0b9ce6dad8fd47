"""The settings of `setup`, and which of them have an effect.

The master's address and the size of the offered memory do. Upstream's metadata server, NICs and staging buffer have no
counterpart: the master knows all locations, and bytes move directly between the caller's memory and the pool's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.base.address import host_port, parse_address
from moonpool.base.config import from_mapping
from moonpool.base.errors import ConfigError
from moonpool.base.units import parse_nbytes

_LOG = logging.getLogger(__name__)
_FOREIGN_SCHEMES = ("etcd://", "redis://", "k8s://", "http://", "https://")
_P2P = "P2PHANDSHAKE"


@dataclass(frozen=True, kw_only=True)
class SetupConfig:
    """Upstream's settings with upstream's defaults. Sizes may be written "16MB", which is binary here as there."""

    local_hostname: str  # of this process, with or without a port; others reach its memory at this address
    metadata_server: str
    global_segment_size: int | str = 16 * 1024 * 1024  # memory to offer to the pool; 0 offers none
    local_buffer_size: int | str = 16 * 1024 * 1024
    protocol: str = "tcp"
    rdma_devices: str = ""
    master_server_addr: str = "127.0.0.1:50051"
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300
    ipc_socket_path: str = ""

    def __post_init__(self) -> None:
        if not self.local_hostname:
            raise ConfigError("local_hostname is missing", param="local_hostname")
        if not self.tenant_id or "/" in self.tenant_id:
            raise ConfigError(f"{self.tenant_id!r} is no tenant; write letters without a slash", param="tenant_id")
        _ = (self.offered_nbytes, self.master_address)  # refused here when they cannot be read, not half way through

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SetupConfig:
        """ConfigError when a key is unknown, missing or of the wrong type."""
        return from_mapping(cls, values)

    @property
    def master_address(self) -> str:
        """Of our master, as we write addresses."""
        text = self.master_server_addr
        if text.startswith(_FOREIGN_SCHEMES):
            raise ConfigError(f"{text!r} names no Moonpool master; write host:port or unix:/path")
        return str(parse_address(text if text.startswith(("unix:", "tcp:")) else f"tcp:{text}"))

    @property
    def offered_nbytes(self) -> int:
        return _binary_nbytes(self.global_segment_size)

    @property
    def local_buffer_nbytes(self) -> int:
        """What BufferPool takes for its size; nothing else is staged in a buffer here."""
        return _binary_nbytes(self.local_buffer_size)

    @property
    def host(self) -> str:
        """local_hostname without its port, and without brackets."""
        return split_host(self.local_hostname)[0]

    @property
    def port(self) -> int | None:
        """The port of local_hostname, if it has one."""
        return split_host(self.local_hostname)[1]

    def hostname(self, port: int) -> str:
        """Return `host:port`, as upstream names a client."""
        return host_port(self.host, port)

    @property
    def namespace(self) -> bytes:
        """The prefix of every key: it separates tenants from each other and from Moonpool's own blocks."""
        return f"mooncake/{self.tenant_id}/".encode()

    def log_ignored_settings(self) -> None:
        """Log a line for each setting that has no effect here."""
        if self.metadata_server and self.metadata_server != _P2P:
            _LOG.info("metadata_server %r is not asked: Moonpool's master has its part", self.metadata_server)
        if self.protocol != "tcp":
            _LOG.info("protocol %r: bytes go through shared memory or tcp", self.protocol)
        for name in ("enable_ssd_offload", "enable_client_http_server", "ipc_socket_path"):
            if getattr(self, name):
                _LOG.warning("%s is not for this client to do; the pool's nodes have their own settings", name)


def split_host(text: str) -> tuple[str, int | None]:
    """Return the host and its port, if it has one. Colons without brackets are those of an IPv6 address."""
    host, _, port = text.rpartition(":")
    has_port = port.isascii() and port.isdigit() and (text.count(":") == 1 or host.endswith("]"))
    return (host.strip("[]"), int(port)) if has_port else (text.strip("[]"), None)


def _binary_nbytes(size: int | str) -> int:
    """Upstream's "16MB" is 16 * 1024 * 1024."""
    if isinstance(size, int):
        return parse_nbytes(size)
    text = size.strip().lower().removesuffix("b")
    return parse_nbytes(f"{text}ib" if text[-1:] in {"k", "m", "g", "t"} else text)
