"""The settings of a command, and the layers that their values come from. Pure.

A setting is a field of a configuration dataclass. It has one name on the command line, in a file and in the
environment: `--ssd-size`, `ssd_size`, `MOONPOOL_SSD_SIZE`. Values mean the same in all three: sizes are written `64GB`,
and the word `none` stands for "no value" where a setting may have none. `merge` takes each value from the highest layer
that has it: the command line, the environment, the file, and last the dataclass's default.

A hidden setting (metadata `{"hidden": True}`) is for the command line alone: an older form, or a thing of one process.
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from moonpool.base.config import from_mapping, nearest, option_name
from moonpool.base.errors import ConfigError
from moonpool.base.units import exact_size, parse_nbytes

T = TypeVar("T")
PREFIX = "MOONPOOL_"  # of all variables
NONE = "none"  # this value means None instead of the default
NOT_SHOWN = "(set, not shown)"
_FORMER_VARIABLES = {"state_dir": "MOONPOOL_STATE"}  # accepted after the variable that the rule names
_WORDS = {True: ("1", "true", "yes", "on"), False: ("0", "false", "no", "off")}
_TEXT_SIZES = {"dram", "kv", "ssd_size"}  # settings of `serve` that keep a size as it was written
_SECRET = re.compile(r"(^|_)(api_keys|admin_keys|key|secret|token|password)$")
_FIELD = re.compile(r"\s+(\w+)\s*:[^#]*(?:#\s*(.+?))?\s*$")
_COMMENT = re.compile(r"\s+#\s*(.+?)\s*$")


class Source(StrEnum):
    """Where a value comes from; the first one wins."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


def file_key(field_name: str) -> str:
    """Return the name of the field in a file: that of its option, with _ for -."""
    return option_name(field_name).replace("-", "_")


def variable_name(field_name: str) -> str:
    """Return the environment variable of the field."""
    return PREFIX + file_key(field_name).upper()


@dataclass(frozen=True, slots=True)
class Setting:
    """One field. `field` is its name, with that of the outer field in front where dataclasses are nested."""

    field: str
    kind: Any  # its type, without None
    may_be_none: bool
    default: Any  # MISSING: it must be given
    help: str | None = None
    hidden: bool = False

    @property
    def key(self) -> str:
        return file_key(self.field)

    @property
    def option(self) -> str:
        return f"--{option_name(self.field)}"

    @property
    def variable(self) -> str:
        return variable_name(self.field)

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) in (tuple, list)

    @property
    def is_size(self) -> bool:
        return self.field.endswith("_nbytes") or (self.kind is str and self.key in _TEXT_SIZES)

    @property
    def is_secret(self) -> bool:
        """Whether the value itself, not the name of a file with it, must not be shown."""
        return _SECRET.search(self.key) is not None

    @property
    def choices(self) -> list[str]:
        if get_origin(self.kind) is Literal:
            return [str(value) for value in get_args(self.kind)]
        if isinstance(self.kind, type) and issubclass(self.kind, StrEnum):
            return [member.value for member in self.kind]
        return []

    def variable_in(self, environment: Mapping[str, str]) -> str | None:
        """Return the variable that states this setting; None if none does. An empty variable states nothing."""
        names = (self.variable, _FORMER_VARIABLES.get(self.key, ""))
        return None if self.hidden else next((name for name in names if environment.get(name)), None)

    def from_text(self, text: str) -> Any:
        """Return the value that an environment variable states. Raise ConfigError, without a name in front."""
        if self.may_be_none and text == NONE:
            return None
        if self.is_list:
            return [part.strip() for part in text.split(",") if part.strip()]
        if self.kind is bool:
            found = [value for value, words in _WORDS.items() if text.lower() in words]
            return found[0] if found else self._refuse(text)
        if self.kind in (int, float) and not self.is_size:
            try:
                return self.kind(text)
            except ValueError:
                self._refuse(text)
        return self.checked(text)

    def from_file(self, value: Any) -> Any:
        """Return the value that a file states. Raise ConfigError, without a name in front."""
        if self.may_be_none and value == NONE:
            return None
        if self.is_list:
            is_right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        elif self.kind is bool:
            is_right = isinstance(value, bool)
        elif self.kind is float:
            is_right = isinstance(value, int | float) and not isinstance(value, bool)
        elif self.kind is int:
            is_right = isinstance(value, (int, str) if self.is_size else int) and not isinstance(value, bool)
        else:
            is_right = isinstance(value, str)
        return self.checked(value) if is_right else self._refuse(value)

    def checked(self, value: Any) -> Any:
        """Return the value, a size in bytes as a number if the field is one. Raise ConfigError if it is none of the
        choices, or not a size."""
        if self.may_be_none and value in (None, NONE):
            return None
        if self.choices and str(value) not in self.choices:
            raise ConfigError(f"cannot be {value!r}; choose one of: {', '.join(self.choices)}", param=self.field)
        if self.is_size:
            nbytes = parse_nbytes(value)
            return nbytes if self.kind is int else value
        return value

    def _refuse(self, value: Any) -> Any:
        shown = NOT_SHOWN if self.is_secret else repr(value)
        raise ConfigError(f"must be {self._expected}, not {shown}", param=self.field)

    @property
    def _expected(self) -> str:
        if self.is_list:
            return 'a list of texts, such as ["a", "b"]'
        if self.is_size:
            return 'a size in quotes, such as "64GB"'
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        return words.get(self.kind, "a text in quotes")

    def to_toml(self, value: Any) -> str:
        """Return the value as a file states it: from_file() of the parsed text returns the value again."""
        if value is None:
            return f'"{NONE}"'
        if isinstance(value, bool):
            return str(value).lower()
        if self.is_size and isinstance(value, int):
            return f'"{exact_size(value)}"'
        if isinstance(value, tuple | list):
            return f"[{', '.join(_quoted(str(each)) for each in value)}]"
        return repr(value) if isinstance(value, int | float) else _quoted(str(value))

    def shown(self, value: Any) -> str:
        """Return the value for people; never that of a secret."""
        return NOT_SHOWN if self.is_secret and value is not None else self.to_toml(value)


@dataclass(frozen=True, slots=True)
class InForce:
    """The value of a setting, and where it comes from: `where` names the variable, or the table of the file."""

    setting: Setting
    value: Any
    source: Source
    where: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source by field name, as plain data."""

    source: Source
    values: Mapping[str, Any]
    where: str = ""


def settings_of(*configs: type[Any]) -> dict[str, Setting]:
    """Return the settings of dataclasses by field name. A field that two of them share is one setting."""
    found: dict[str, Setting] = {}
    for config in configs:
        for setting in _settings(config, ""):
            found.setdefault(setting.field, setting)
    return found


def _settings(config: type[Any], prefix: str) -> list[Setting]:
    hints, comments = get_type_hints(config), _comments(config)
    found: list[Setting] = []
    own = list(inspect.get_annotations(config))  # its own fields first, as they are written, then inherited ones
    for each in sorted(fields(config), key=lambda each: own.index(each.name) if each.name in own else len(own)):
        name, hint = prefix + each.name, hints[each.name]
        if _is_nested(hint):
            found += _settings(hint, name + "_")
            continue
        default = each.default if each.default_factory is MISSING else each.default_factory()
        kind, may_be_none = _without_none(hint)
        hidden = bool(each.metadata.get("hidden", False))
        found.append(Setting(name, kind, may_be_none, default, comments.get(each.name), hidden))
    return found


def merge(settings: Mapping[str, Setting], layers: Iterable[Layer]) -> dict[str, InForce]:
    """Return each setting's value from the first layer that has it, or else its default. A required setting that no
    layer has is missing in what is returned."""
    found: dict[str, InForce] = {}
    for layer in layers:
        for name, value in layer.values.items():
            found.setdefault(name, InForce(settings[name], value, layer.source, layer.where))
    for name, setting in settings.items():
        if not setting.is_required:
            found.setdefault(name, InForce(setting, setting.default, Source.DEFAULT))
    return {name: found[name] for name in settings if name in found}


def build(config: type[T], in_force: Mapping[str, InForce]) -> T:
    """Return the configuration that the settings make. Raise ConfigError if it refuses them."""
    return from_mapping(config, _nested(config, in_force, ""))


def _nested(config: type[Any], in_force: Mapping[str, InForce], prefix: str) -> dict[str, Any]:
    hints, found = get_type_hints(config), {}
    for each in fields(config):
        name = prefix + each.name
        if _is_nested(hints[each.name]):
            found[each.name] = _nested(hints[each.name], in_force, name + "_")
        elif name in in_force:
            found[each.name] = in_force[name].value
    return found


def from_environment(settings: Mapping[str, Setting], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that the environment states. Raise ConfigError with the variable's name."""
    found = {}
    for name, setting in settings.items():
        variable = setting.variable_in(environment)
        if variable is None:
            continue
        try:
            found[name] = setting.from_text(environment[variable])
        except ConfigError as error:
            hint = ""
            if environment[variable].startswith(("tcp://", "udp://")):
                hint = "; if Kubernetes set it for a Service called moonpool, set enableServiceLinks: false for the pod"
            raise ConfigError(f"{variable} {error}{hint}", param=name) from error
    return found


def unknown_variables(environment: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a line about each variable that looks like one of the known ones and is none: most likely misspelt."""
    names = {each.removeprefix(PREFIX) for each in {*known, *_FORMER_VARIABLES.values()}}
    given = {each.removeprefix(PREFIX) for each in environment if each.startswith(PREFIX)}
    found = {each: difflib.get_close_matches(each, names, n=1) for each in sorted(given - names)}
    return [f"{PREFIX}{each} is not a setting; did you mean {PREFIX}{like[0]}?" for each, like in found.items() if like]


def from_table(settings: Mapping[str, Setting], table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that a table of a file states, by field name, and what is wrong with the others."""
    by_key = {setting.key: setting for setting in settings.values() if not setting.hidden}
    values, faults = {}, []
    for key, value in table.items():
        setting = by_key.get(key)
        if setting is None:
            faults.append(unknown_key(key, by_key))
            continue
        try:
            values[setting.field] = setting.from_file(value)
        except ConfigError as error:
            faults.append(f"{key} {error}")
    return values, faults


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return what is wrong with a key that no setting has, with the one that is most like it."""
    known = set(known)
    renamed = file_key(key)
    hint = f"; did you mean {renamed!r}?" if renamed != key and renamed in known else nearest(key, known)
    return f"{key!r} is unknown{hint}"


def _quoted(text: str) -> str:
    # A JSON string is a TOML string, but for one character that JSON leaves as it is.
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def _is_nested(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0], len(kinds) < len(get_args(hint))


def _comments(config: type[Any]) -> dict[str, str]:
    """Return the fields' comments by field name, those of inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines() if is_dataclass(base) else ():
            if comment := _COMMENT.match(line):
                above.append(comment[1])
                continue
            each = _FIELD.match(line)
            if each and (each[2] or above):
                found[each[1]] = each[2] or " ".join(above)
            above = []
    return found
