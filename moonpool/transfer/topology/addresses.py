"""The IP addresses of this machine's interfaces, asked of the kernel by netlink: sysfs does not know them."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator

_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE, _NLMSG_ERROR = 20, 22, 3, 2
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface index
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_RECEIVE_NBYTES = 1 << 16
_TIMEOUT_S = 1.0


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Interface name -> its addresses; empty when the kernel does not let us ask.

    IPv6 link-local addresses are left out: a client would have to name the interface as well.
    """
    try:
        messages = list(_dump())
        names = dict(socket.if_nameindex())
    except OSError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for index, address in parse_addresses(messages):
        if index in names:
            found[names[index]] = (*found.get(names[index], ()), address)
    return found


def parse_addresses(messages: list[bytes]) -> Iterator[tuple[int, str]]:
    """Interface index and address of each RTM_NEWADDR message."""
    for message in messages:
        _, kind, *_ = _HEADER.unpack_from(message)
        if kind != _RTM_NEWADDR:
            continue
        *_, index = _ADDRESS.unpack_from(message, _HEADER.size)
        attributes = dict(_attributes(message[_HEADER.size + _ADDRESS.size :]))
        # On a point-to-point link ADDRESS is the other end and LOCAL is ours; IPv6 has ADDRESS alone.
        packed = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
        if packed is not None:
            address = ipaddress.ip_address(packed)
            if address.version == 4 or not address.is_link_local:
                yield index, str(address)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)


def _dump() -> Iterator[bytes]:
    """The kernel's answer to "all addresses", message by message."""
    request = _HEADER.pack(_HEADER.size + _ADDRESS.size, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.send(request + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        while True:
            for message in split_messages(sock.recv(_RECEIVE_NBYTES)):
                kind = _HEADER.unpack_from(message)[1]
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return
                yield message


def split_messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _HEADER.size <= len(data):
        length = _HEADER.unpack_from(data, at)[0]
        if length < _HEADER.size:
            return
        yield data[at : at + length]
        at += _aligned(length)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
