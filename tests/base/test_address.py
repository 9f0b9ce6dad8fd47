"""Addresses as one string."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.base.address import Address, parse_address
from moonpool.base.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/m.sock", Address("unix", path="/run/m.sock")),
        ("unix:/odd:name", Address("unix", path="/odd:name")),
        ("tcp:127.0.0.1:7000", Address("tcp", host="127.0.0.1", port=7000)),
        ("tcp:node-7:0", Address("tcp", host="node-7")),
        ("tcp:[::1]:80", Address("tcp", host="::1", port=80)),
        ("tcp:[fe80::1%eth0]:80", Address("tcp", host="fe80::1%eth0", port=80)),
    ],
)
def test_parse_and_back(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "tcp:",
        "tcp:host",
        "tcp:host:",
        "tcp::80",
        "tcp:h:65536",
        "tcp:h:-1",
        "tcp:h:²",
        "http:h:80",
        "h:80",
        "tcp:::1:80",
        "tcp:fd00::1:80",
        "tcp:[::1:80",
        "tcp:::1]:80",
        "tcp:[]:80",
        "tcp:[h]:80",
    ],
)
def test_bad_text(text: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        parse_address(text)


def test_a_socket_path_that_the_kernel_would_cut() -> None:
    with pytest.raises(ConfigError, match="longer than"):
        parse_address("unix:/" + "x" * 107)
    parse_address("unix:/" + "x" * 106)


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(parse_address("unix:run/../m.sock")) == f"unix:{tmp_path}/m.sock"
