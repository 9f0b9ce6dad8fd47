"""Unix sockets that only the user who made them, and root, may use.

Two locks, because either may be left open by mistake: the socket's mode is 0600 before it listens, whatever the umask;
and the kernel's word on who connected (SO_PEERCRED) is checked, whatever the mode.
"""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid
_ROOT = 0


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
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (os.geteuid(), _ROOT)
