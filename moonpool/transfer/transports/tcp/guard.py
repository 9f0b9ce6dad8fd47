"""Who may talk to a tcp port: the exchange that opens a guarded connection, without I/O (docs/formats.md, version 2).

Four frames of 56 bytes each, inside TLS where that is configured. All numbers are little-endian.

     0  magic "MPTG"    4  version u8 = 2    5  kind u8    6  secret u8: 1 if the sender has one    7  reserved u8 = 0
     8  value, 32 bytes                     40  reserved, 12 bytes of 0                 52  CRC-32C u32 of bytes 0 to 52

    caller  1 HELLO      value: the caller's nonce, 32 random bytes
    owner   2 CHALLENGE  value: the owner's nonce
    caller  3 PROOF      value: HMAC-SHA256(secret, "moonpool-tcp-guard" 02 "C" caller's nonce, owner's nonce)
    owner   4 WELCOME    value: the same with "O" for "C"; requests (tcp/frames.py) may follow

Both sides thus show that they know the secret, and neither learns anything of it; the caller, who can be anybody, shows
it first. An answer cannot be used again, as both nonces are new, nor sent back, as the roles differ. Where only TLS is
configured `secret` is 0 in all frames, and both values of the last two are 32 bytes of 0.

An owner that does not let the caller in answers with a refusal (tcp/frames.py, request id 0) in place of its next frame
and closes the connection. A HELLO is as long as a request's head, so an owner without a guard refuses it at once; so
does an owner with a guard that gets a request instead.

The secret says who is at the other end when a connection begins. It does not protect what follows from somebody who
can change packets on their way: that is what TLS is for.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from moonpool.base.checksum import crc32c
from moonpool.base.errors import ConfigError, DamagedFrame, MoonpoolError, Overloaded, ProtocolError, Unauthorized
from moonpool.base.frames import damaged
from moonpool.base.security import Secret, TlsConfig, TlsIdentity
from moonpool.transfer.transports.tcp.frames import MAGIC as REQUEST_MAGIC

MAGIC = b"MPTG"
VERSION = 2
NONCE_NBYTES = 32
_FRAME = struct.Struct("<4sBBBB32s12s")
_CRC = struct.Struct("<I")
FRAME_NBYTES = _FRAME.size + _CRC.size
_LABEL = b"moonpool-tcp-guard"
_NOTHING = bytes(NONCE_NBYTES)
_UNUSED = bytes(12)
Frame: TypeAlias = bytes | bytearray | memoryview


class GuardMessage(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4


@dataclass(frozen=True)
class Guard:
    """What both ends must have. An owner gives a caller `timeout_s` to show it, and keeps `max_unproven` who have not
    yet: they take no place of those who have.
    """

    secret: Secret | None = None
    tls: TlsIdentity | None = None
    timeout_s: float = 5.0
    max_unproven: int = 64

    def __post_init__(self) -> None:
        if self.secret is None and self.tls is None:
            raise ConfigError("a guard asks for a secret, for TLS or for both; without a guard a port is open")
        if self.timeout_s <= 0 or self.max_unproven < 1:
            raise ConfigError("a guard gives callers some time and takes at least one at a time")

    @classmethod
    def from_files(cls, secret_file: str | None, tls: TlsConfig | None) -> Guard | None:
        """None when neither is given: the port is open. ConfigError when a file cannot be used."""
        if secret_file is None and tls is None:
            return None
        secret = None if secret_file is None else Secret.from_file(secret_file)
        return cls(secret, None if tls is None else tls.load())


class CallerSide:
    """hello() -> challenge -> proof() -> welcome -> check_welcome(). One object per connection."""

    def __init__(self, secret: Secret | None, nonce: bytes | None = None) -> None:
        self._secret = secret
        self._nonce = nonce or secrets.token_bytes(NONCE_NBYTES)
        self._owner_nonce = b""

    def hello(self) -> bytes:
        return _pack(GuardMessage.HELLO, self._secret, self._nonce)

    def proof(self, challenge: Frame) -> bytes:
        """ProtocolError when the owner speaks nonsense."""
        self._owner_nonce = self._value(challenge, GuardMessage.CHALLENGE)
        return _pack(GuardMessage.PROOF, self._secret, _proof(self._secret, b"C", self._nonce, self._owner_nonce))

    def check_welcome(self, welcome: Frame) -> None:
        """Unauthorized when the owner does not know our secret."""
        value = self._value(welcome, GuardMessage.WELCOME)
        if not hmac.compare_digest(value, _proof(self._secret, b"O", self._nonce, self._owner_nonce)):
            raise Unauthorized(
                "the owner does not know this side's secret; both need the same content in their secret_file"
            )

    def _value(self, frame: Frame, kind: GuardMessage) -> bytes:
        has_secret, value = _unpack(frame, kind)
        if has_secret is not (self._secret is not None):
            raise ProtocolError("the owner answers another question than was asked")
        return value


class OwnerSide:
    """hello -> challenge() -> proof -> welcome(): when that returns the caller is let in. One object per connection."""

    def __init__(self, secret: Secret | None, nonce: bytes | None = None) -> None:
        self._secret = secret
        self._nonce = nonce or secrets.token_bytes(NONCE_NBYTES)
        self._caller_nonce = b""

    def challenge(self, hello: Frame) -> bytes:
        """Unauthorized when the caller has not what is asked for, ProtocolError when it speaks nonsense."""
        if bytes(hello[:4]) == REQUEST_MAGIC:
            raise Unauthorized(self._demand())
        self._caller_nonce = self._value(hello, GuardMessage.HELLO)
        return _pack(GuardMessage.CHALLENGE, self._secret, self._nonce)

    def welcome(self, proof: Frame) -> bytes:
        """Unauthorized when the caller does not know our secret."""
        value = self._value(proof, GuardMessage.PROOF)
        if not hmac.compare_digest(value, _proof(self._secret, b"C", self._caller_nonce, self._nonce)):
            raise Unauthorized(
                "the caller's secret is not the owner's; both need the same content in their secret_file"
            )
        return _pack(GuardMessage.WELCOME, self._secret, _proof(self._secret, b"O", self._caller_nonce, self._nonce))

    def _value(self, frame: Frame, kind: GuardMessage) -> bytes:
        has_secret, value = _unpack(frame, kind)
        if has_secret is not (self._secret is not None):
            raise Unauthorized(self._demand())
        return value

    def _demand(self) -> str:
        if self._secret is None:
            return "this owner has no secret, only TLS; remove secret_file on one side or set it on both"
        return "this owner asks for a secret; set secret_file to a file with the same content as the owner's"


def read_refusal(error: MoonpoolError) -> MoonpoolError:
    """What a caller makes of a refusal by an owner that has proved nothing yet: it may be anybody, so it is believed
    in nothing that would matter (that a segment is gone, for example).
    """
    if isinstance(error, Unauthorized | Overloaded | DamagedFrame):
        return error
    return Unauthorized(
        "the owner does not ask for what this side has to show (secret_file, tls_cert_file), so it may be somebody "
        f"else; set it on both sides or on none. It said: {error}"
    )


def _proof(secret: Secret | None, role: bytes, caller_nonce: bytes, owner_nonce: bytes) -> bytes:
    if secret is None:
        return _NOTHING
    return secret.mac(_LABEL + bytes([VERSION]) + role + caller_nonce + owner_nonce)


def _pack(kind: GuardMessage, secret: Secret | None, value: bytes) -> bytes:
    frame = _FRAME.pack(MAGIC, VERSION, kind, secret is not None, 0, value, _UNUSED)
    return frame + _CRC.pack(crc32c(frame))


def _unpack(frame: Frame, expected: GuardMessage) -> tuple[bool, bytes]:
    """(whether the sender has a secret, value); ProtocolError when a rule is broken, or DamagedFrame."""
    if len(frame) != FRAME_NBYTES:
        raise ProtocolError(f"a frame of the guard has {FRAME_NBYTES} bytes, not {len(frame)}")
    magic, version, kind, secret, reserved, value, unused = _FRAME.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError("the peer does not open the connection as a guarded one is opened")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks version {version} of the guard's protocol, this side {VERSION}")
    if crc32c(bytes(frame[: _FRAME.size])) != _CRC.unpack_from(frame, _FRAME.size)[0]:
        raise damaged("a frame of the guard")
    if kind != expected or secret > 1 or reserved or unused != _UNUSED:
        raise ProtocolError(f"a {expected.name} was expected")
    return bool(secret), value
