"""How engines find each other by name: Mooncake's HTTP metadata, or no server at all (P2PHANDSHAKE).

With an HTTP server each engine stores its address under `mooncake/rpc_meta/NAME`. The ranges that it has registered are
not stored there: peers ask the engine itself.
"""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote, urlsplit

import msgspec

from moonpool.base.address import host_port, parse_address
from moonpool.base.errors import AlreadyExists, ConfigError, InvalidInput, NotFound, PeerLost

P2P = "P2PHANDSHAKE"
_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_OK, _BAD_REQUEST, _NOT_FOUND = 200, 400, 404


class EngineEntry(msgspec.Struct, frozen=True):
    """What the server has of an engine, in upstream's format."""

    ip_or_host_name: str
    rpc_port: int

    @property
    def address(self) -> str:
        return host_port(self.ip_or_host_name, self.rpc_port)


class EngineNames(Protocol):
    """From an engine's name to its `host:port`."""

    def publish(self, name: str, entry: EngineEntry, is_alive: Callable[[str], bool]) -> None:
        """Make the engine known. AlreadyExists when an engine of that name lives at another address."""
        ...

    def withdraw(self, name: str) -> None: ...

    def resolve(self, name: str) -> str:
        """Return the address. NotFound when the name is not known, InvalidInput when it cannot be one."""
        ...


def engine_names(metadata_server: str, kind: str) -> EngineNames:
    """Return the names behind upstream's metadata connection string. ConfigError for an unsupported kind of server."""
    if metadata_server == P2P:
        return PeerNames()
    url = metadata_server if "://" in metadata_server else f"{kind}://{metadata_server}"
    if url.startswith(("http://", "https://")):
        return HttpNames(url)
    raise ConfigError(f"metadata server {url!r} is not supported; write {P2P} or http://host:port/metadata")


class PeerNames:
    """Without a server: a name is an address, so there is nothing to publish or to withdraw."""

    def publish(self, name: str, entry: EngineEntry, is_alive: Callable[[str], bool]) -> None:
        pass

    def withdraw(self, name: str) -> None:
        pass

    def resolve(self, name: str) -> str:
        try:
            return str(parse_address(f"tcp:{name}")).removeprefix("tcp:")
        except ConfigError as error:
            raise InvalidInput(f"{name!r} is no host:port") from error


class HttpNames:
    """Names in an HTTP metadata server. PeerLost when it does not answer."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        if not self._url.hostname:
            raise ConfigError(f"{url!r} names no host")

    def publish(self, name: str, entry: EngineEntry, is_alive: Callable[[str], bool]) -> None:
        """The server keeps the entry of an engine that was killed, and refuses to replace it. So an entry whose engine
        does not answer is removed first.
        """
        body = msgspec.json.encode(entry)
        status, _ = self._ask("PUT", name, body)
        if status == _BAD_REQUEST:
            found = self.resolve(name)
            if is_alive(found):
                raise AlreadyExists(f"an engine named {name!r} is running at {found}")
            _LOG.info("the engine named %s at %s is gone; its entry is replaced", name, found)
            self._ask("DELETE", name)
            status, _ = self._ask("PUT", name, body)
        if status != _OK:
            raise PeerLost(f"the metadata server refused the entry of {name!r} ({status})")

    def withdraw(self, name: str) -> None:
        self._ask("DELETE", name)

    def resolve(self, name: str) -> str:
        status, body = self._ask("GET", name)
        if status == _NOT_FOUND:
            raise NotFound(f"the metadata server knows no engine {name!r}")
        if status != _OK:
            raise PeerLost(f"the metadata server answered {status}")
        try:
            return msgspec.json.decode(body, type=EngineEntry).address
        except msgspec.DecodeError as error:
            raise InvalidInput(f"the metadata of {name!r} cannot be read: {error}") from error

    def _ask(self, method: str, name: str, body: bytes | None = None) -> tuple[int, bytes]:
        url = self._url
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=_TIMEOUT_S)
        try:
            key = quote(f"mooncake/rpc_meta/{name}", safe="")
            connection.request(method, f"{url.path or '/metadata'}?key={key}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise PeerLost(f"the metadata server at {url.netloc} does not answer: {error}") from error
        finally:
            connection.close()
