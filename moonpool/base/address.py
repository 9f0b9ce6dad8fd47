"""Addresses as one string: `unix:/path/to.sock` or `tcp:host:port`. Port 0 asks the system for a free one.

An IPv6 address stands in brackets, `tcp:[::1]:7000`, and is stored without them. A relative path becomes absolute where
the address is parsed, because it is passed on to processes with other working directories.

Unix sockets are private to the user who made them, and to root. There are two checks, because either may be left open
by mistake: the socket's mode is 0600 before it listens, whatever the umask; and the peer's user, as the kernel reports
it (SO_PEERCRED), is checked, whatever the mode.

A socket whose file was removed still listens, and no process can reach it any more. So a process keeps the paths of its
sockets here, and looks for its files (base/process.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

import msgspec

from moonpool.base.errors import ConfigError

_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid
_ROOT = 0
# The kernel's limit for a Unix socket path, its closing zero included.
UNIX_PATH_NBYTES = 108


def split_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of a list that is separated by commas. Raise ConfigError for a bad one, or for none."""
    found = tuple(each.strip() for each in text.split(",") if each.strip())
    if not found:
        raise ConfigError("an address is missing")
    for each in found:
        parse_address(each)
    return found


_own_sockets: dict[str, tuple[int, int]] = {}  # device and inode by path, of the sockets at which this process listens


def add_own_socket(path: str) -> None:
    """Remember that this process listens at the path. Raise OSError if there is no file."""
    _own_sockets[path] = _identity(path)


def remove_own_socket(path: str) -> None:
    """Forget the socket, and remove its file unless it is another one by now. Idempotent."""
    identity = _own_sockets.pop(path, None)
    with contextlib.suppress(FileNotFoundError):
        if identity is not None and _identity(path) == identity:
            os.unlink(path)


def own_sockets_lost() -> list[str]:
    """Return the paths of those of this process's sockets whose files were removed or replaced."""
    return [path for path, identity in list(_own_sockets.items()) if not _is_there(path, identity)]


def _is_there(path: str, identity: tuple[int, int]) -> bool:
    try:
        return _identity(path) == identity
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # it may be there
        return True


def _identity(path: str) -> tuple[int, int]:
    info = os.lstat(path)
    return info.st_dev, info.st_ino


def bind_private(path: str) -> socket.socket:
    """Return a socket bound to `path` with mode 0600 that does not listen yet. OSError when it cannot be bound."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)  # connecting is refused until the socket listens, so no peer comes in between
    except OSError:
        sock.close()
        raise
    return sock


def is_own_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end runs as this process's user or as root."""
    return _credentials(sock)[1] in (os.geteuid(), _ROOT)


def peer_pid(sock: socket.socket) -> int:
    """Return the pid of the process that connected; 0 if that process has no pid in the namespace of this one."""
    return _credentials(sock)[0]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process at the other end of a Unix socket."""
    found: tuple[int, int, int] = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return found


class Address(msgspec.Struct, frozen=True):
    """A parsed address: `path` for unix, `host` and `port` for tcp."""

    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.scheme == "unix" else f"tcp:{host_port(self.host, self.port)}"


def host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """Return the parsed address. ConfigError, with an example of a right one, when it cannot be parsed."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        rest = os.path.abspath(rest)
        if len(rest.encode()) >= UNIX_PATH_NBYTES:
            raise ConfigError(f"socket path {rest!r} is longer than {UNIX_PATH_NBYTES - 1} bytes")
        return Address("unix", path=rest)
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1] if ":" in host else ""
    elif ":" in host:
        host = ""  # IPv6 without brackets: it is not clear where the port begins
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 65536:
        return Address("tcp", host=host, port=int(port))
    raise ConfigError(f"{text!r} is not an address; write unix:/path/to.sock or tcp:127.0.0.1:7000")
