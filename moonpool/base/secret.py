"""A secret that several processes share, from a file that only its owner may read.

Its bytes show up nowhere but where they are used: not in a repr, a log or an error, and a Secret cannot be pickled.
"""

from __future__ import annotations

import hmac
import os
import stat
from typing import NoReturn

from moonpool.base.errors import ConfigError

MIN_SECRET_NBYTES = 16
_MAX_SECRET_NBYTES = 4096
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IXOTH


class Secret:
    """At least 16 bytes."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < MIN_SECRET_NBYTES:
            raise ConfigError(
                f"a secret needs at least {MIN_SECRET_NBYTES} bytes; `openssl rand -hex 32` makes a good one"
            )
        self._value = bytes(value)

    @classmethod
    def from_file(cls, path: str) -> Secret:
        """The file's content without the whitespace at its ends; ConfigError, which says what to do."""
        value = read_private_file(path, _MAX_SECRET_NBYTES).strip()
        try:
            return cls(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def mac(self, message: bytes) -> bytes:
        """HMAC-SHA256 of the message, 32 bytes: shows that one knows the secret, and nothing of the secret."""
        return hmac.digest(self._value, message, "sha256")

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]  # nothing should be looked up by a secret

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret does not leave its process")


def read_private_file(path: str, max_nbytes: int) -> bytes:
    """A small file's content; ConfigError when it cannot be read, is too large or open to other users."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make us wait
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a file")
            if mode & _OTHERS:
                raise ConfigError(f"{path} is open to every user of this machine; chmod 600 it")
            with open(fd, "rb", closefd=False) as file:
                content = file.read(max_nbytes + 1)
        finally:
            os.close(fd)  # not left to open(), which keeps a folder's descriptor when it refuses it
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > max_nbytes:
        raise ConfigError(f"{path} is larger than {max_nbytes} bytes; is it the right file?")
    return content
