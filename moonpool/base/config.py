"""Configuration is one frozen dataclass per component; this turns plain data into it and back.

Each default is written once, in the dataclass. Unknown keys (of inner dataclasses too) and wrong types are errors
that name the key. Paths become absolute here, where they enter: others are told of them, and they work elsewhere.
A relative path counts from the folder in which the command was started, also in a file.

On a command line a field is an option, by default under its own name. OPTION_NAMES lists the fields whose option has
another name, so that one thing has one name at every role: `--listen` is where a role listens, `--master` and
`--conductor` are whom it reaches, `--dram`, `--ssd` and `--kv` are what it may take. base/settings.py has the names in
files and in the environment, which follow from the options'.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from moonpool.base.errors import ConfigError

T = TypeVar("T")
_PATH_ENDINGS = ("_dir", "_file")

# field: option. The fields' own names are accepted too, for one version.
OPTION_NAMES = {
    "address": "listen",
    "master_address": "master",
    "store_address": "master",
    "conductor_address": "conductor",
    "dram_nbytes": "dram",
    "kv_nbytes": "kv",
    "ssd_dir": "ssd",
    "ssd_nbytes": "ssd-size",
    "ssd_file_nbytes": "ssd-file-size",
    "max_body_nbytes": "max-body",
}


def option_name(field_name: str) -> str:
    """Return the command-line option of the field, without its dashes in front."""
    return OPTION_NAMES.get(field_name, field_name.replace("_", "-"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known one that is most like it, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls`; ConfigError when a key is unknown, missing or of the wrong type."""
    _check_known(cls, values, "")
    try:
        made: T = msgspec.convert(dict(values), cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from error
    make_paths_absolute(made)
    return made


def make_paths_absolute(config: Any) -> None:
    """Change every path of a dataclass, frozen or not, to an absolute one: fields called ..._dir and ..._file. A `~` in
    front is the user's home: no shell has replaced it in a file."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            make_paths_absolute(value)
        elif isinstance(value, str) and value and field.name.endswith(_PATH_ENDINGS):
            object.__setattr__(config, field.name, os.path.abspath(os.path.expanduser(value)))


def _check_known(cls: Any, values: Mapping[str, Any], within: str) -> None:
    assert is_dataclass(cls)
    known, hints = {field.name for field in fields(cls)}, get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            name = f"{within}{key}"
            raise ConfigError(f"unknown setting {name!r}; known are: {', '.join(sorted(known))}", param=name)
        for inner in (hints[key], *get_args(hints[key])):
            if is_dataclass(inner) and isinstance(value, Mapping):
                _check_known(inner, value, f"{within}{key}.")


def from_json(cls: type[T], text: str | bytes) -> T:
    """As from_mapping, from JSON text."""
    try:
        values = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the configuration is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("the configuration must be a JSON object")
    return from_mapping(cls, values)
