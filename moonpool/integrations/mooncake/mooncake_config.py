"""`MooncakeConfig`: the settings that Mooncake's programs read from a JSON file or from the environment.

Names, defaults and errors are upstream's: a ValueError says which setting is wrong. `setup` takes what it states.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)  # upstream's name for it

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1024**3
_DEFAULT_CLIENT_HTTP_PORT = 9300
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = re.compile(r"(?P<number>.*?)\s*(?P<unit>[kmgt]?)b?", re.DOTALL)
_YES = frozenset({"true", "1", "yes", "on", "enable"})
_NO = frozenset({"", "false", "0", "no", "off", "disable"})
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_ENGINE_PROTOCOLS = {"tcp", "rdma", "efa", "nvmeof", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl", "ascend"}
_PROTOCOLS = _ENGINE_PROTOCOLS | {"ub", "ubshmem", "maca", "sunrise_link", "rpc_only"}


def _parse_segment_size(value: Any) -> int:
    """Return a size in bytes: a number, or text such as "16MB" or "1.5 g", whose units are binary."""
    if not isinstance(value, str):
        return int(value)
    match = _SIZE.fullmatch(value.strip().lower())
    assert match is not None, "every text matches"
    if not match["number"]:
        raise ValueError(f"{value!r} is no size: write a number, and after it KB, MB, GB or TB")
    return int(float(match["number"]) * _UNITS[match["unit"]])


def _parse_bool(value: Any) -> bool:
    """Return a yes or no that may be written as text. Raise ValueError for other text."""
    if value is None or isinstance(value, bool | int | float):
        return bool(value)
    text = str(value).strip().lower()
    if text not in _YES | _NO:
        raise ValueError(f"{value!r} is neither yes nor no: write true or false")
    return text in _YES


def _text_or(default: str) -> Callable[[Any], str]:
    return lambda value: default if value is None else str(value)


@dataclass
class MooncakeConfig:
    """Raise ValueError for a negative size, a missing protocol, or a required setting that is empty. A protocol that is
    not known is passed on with a warning.
    """

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = _DEFAULT_CLIENT_HTTP_PORT

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"Invalid protocol: {self.protocol!r}; write tcp, for example")
        self.protocol = self.protocol.strip().lower()
        if self.protocol not in _PROTOCOLS:
            logger.warning("Unrecognised protocol %r; known are %s", self.protocol, ", ".join(sorted(_PROTOCOLS)))
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative: {getattr(self, name)}")
        for name in _REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be a text that is not empty, not {value!r}")

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Read a JSON object. Unknown names in it are ignored, as upstream does."""
        given: Mapping[str, Any] = json.loads(Path(file_path).read_text())
        for name in _REQUIRED:
            if name not in given:
                raise ValueError(f"Missing required config field: {name}")
        return _from_settings(given)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """Read the file that MOONCAKE_CONFIG_PATH names; without it, read the settings from MOONCAKE_MASTER and the
        other variables of that kind.
        """
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path is not None:
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError("Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set.")
        found = {name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ}
        return _from_settings({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", **found})


_READ: dict[str, Callable[[Any], Any]] = {
    "global_segment_size": _parse_segment_size,
    "local_buffer_size": _parse_segment_size,
    "enable_ssd_offload": _parse_bool,
    "ssd_offload_path": _text_or(""),
    "tenant_id": _text_or("default"),
    "enable_client_http_server": _parse_bool,
    "client_http_port": int,
}
_DEFAULTS: dict[str, Any] = {
    "global_segment_size": DEFAULT_GLOBAL_SEGMENT_SIZE,
    "local_buffer_size": DEFAULT_LOCAL_BUFFER_SIZE,
    "protocol": "tcp",
    "device_name": "",
}
_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def _from_settings(given: Mapping[str, Any]) -> MooncakeConfig:
    settings = {**_DEFAULTS, **{name: given[name] for name in _VARIABLES if name in given}}
    return MooncakeConfig(**{name: _READ.get(name, _as_it_is)(value) for name, value in settings.items()})


def _as_it_is(value: Any) -> Any:
    return value
