"""What a peer must show: a shared secret, mutual TLS 1.3, or both.

A secret is read from a file that only its owner may read. Its bytes appear only where they are used: not in a repr, a
log or an error, and a Secret cannot be pickled.

TLS: both sides show a certificate that one common authority signed. No other authority is trusted, not even the
system's, and no version older than TLS 1.3 is accepted. Certificates are read once: restart a process to use renewed
ones.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
from dataclasses import dataclass
from typing import NoReturn

from moonpool.base.errors import ConfigError

MIN_SECRET_NBYTES = 16
_MAX_SECRET_NBYTES = 4096
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IXOTH
_MAX_KEY_NBYTES = 64 * 1024
# What OpenSSL says when the first bytes that come back are not TLS.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})


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
        """Read the secret from a file, without the whitespace at its ends. ConfigError says what to do."""
        value = read_private_file(path, _MAX_SECRET_NBYTES).strip()
        try:
            return cls(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def mac(self, message: bytes) -> bytes:
        """Return the HMAC-SHA256 of the message, 32 bytes. It proves knowledge of the secret without revealing it."""
        return hmac.digest(self._value, message, "sha256")

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]  # secrets are no dictionary keys

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret does not leave its process")


def read_private_file(path: str, max_nbytes: int) -> bytes:
    """Return a small file's content. ConfigError when it cannot be read, is too large or open to other users."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a file")
            if mode & _OTHERS:
                raise ConfigError(f"{path} is open to every user of this machine; chmod 600 it")
            with open(fd, "rb", closefd=False) as file:
                content = file.read(max_nbytes + 1)
        finally:
            os.close(fd)  # open() would keep a folder's descriptor when it refuses it
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > max_nbytes:
        raise ConfigError(f"{path} is larger than {max_nbytes} bytes; is it the right file?")
    return content


@dataclass(frozen=True)
class TlsConfig:
    """PEM files. The certificate must allow both roles (serverAuth and clientAuth), because every process connects
    and accepts, and must name the addresses under which others connect to this process, unless they do not check
    (`check_host`).
    """

    cert_file: str
    key_file: str
    ca_file: str
    check_host: bool = True

    def load(self) -> TlsIdentity:
        """Load the files. ConfigError when a file is missing or unusable, or the key's is open to other users."""
        return TlsIdentity(self)


class TlsIdentity:
    """The two contexts of one process: to connect and to accept."""

    def __init__(self, config: TlsConfig) -> None:
        read_private_file(config.key_file, _MAX_KEY_NBYTES)
        self.check_host = config.check_host
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, config)
        self.client.check_hostname = config.check_host
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, config)
        self.server.num_tickets = 0  # connections are long, and a ticket would look like data on an idle one


def _context(protocol: int, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.cert_file, config.key_file, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{config.cert_file} and {config.key_file} are no pair of PEM files: {error.reason}"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {config.cert_file}: {error.strerror}") from error
    try:
        context.load_verify_locations(config.ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"{config.ca_file} is no PEM file of certificates: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {config.ca_file}: {error.strerror}") from error
    return context


def _no_password() -> NoReturn:
    """Refuse encrypted keys; otherwise OpenSSL would ask at the terminal."""
    raise ConfigError("the TLS key is encrypted; give it without a passphrase, in a file of mode 600")


def explain_tls(error: ssl.SSLError) -> str:
    """Return why TLS with a peer failed, as a part of a sentence about that peer."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted here: {error.verify_message}"
    if reason in _NOT_TLS:
        return "it does not speak TLS"
    words = reason.rpartition("ALERT_")[2].replace("_", " ").lower()
    if "ALERT" in reason and ("certificate" in words or words == "unknown ca"):
        return f"it does not accept this side's certificate: {words}"
    return f"TLS failed: {words or error}"
