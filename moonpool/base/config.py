"""Configuration is one frozen dataclass per component; this turns plain data into it and back.

Each default is written once, in the dataclass. Unknown keys and wrong types are errors that name the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar

import msgspec

from moonpool.base.errors import ConfigError

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls`; ConfigError when a key is unknown, missing or of the wrong type."""
    assert is_dataclass(cls)
    known = {field.name for field in fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known are: {', '.join(sorted(known))}", param=unknown[0])
    try:
        made: T = msgspec.convert(dict(values), cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from error
    return made


def from_json(cls: type[T], text: str | bytes) -> T:
    """As from_mapping, from JSON text."""
    try:
        values = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the configuration is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("the configuration must be a JSON object")
    return from_mapping(cls, values)


def to_json(config: Any) -> str:
    """The dataclass instance as JSON text that from_json takes back."""
    return msgspec.json.encode(asdict(config)).decode()
