"""Command-line options from configuration dataclasses: each default is written once, in the dataclass.

A field `max_num_seqs: int = 8` becomes `--max-num-seqs INTEGER [default: 8]`. Its help is the comment behind the field,
or the comment lines above it. A field without a default is required; a tuple is an option that may be repeated; the
word `none` stands for None where a text may be None. A field in bytes (`dram_nbytes`) takes a size with a unit
(`64GB`). base/config.py checks the values, so a command line and a mapping follow the same types.

Where base/config.py gives the option another name than the field's, the field's name is accepted too, but not shown.
A field with the metadata `{"hidden": True}` is accepted and not shown.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from moonpool.base.config import OPTION_NAMES, from_mapping, option_name
from moonpool.base.errors import ConfigError
from moonpool.base.units import format_nbytes, parse_nbytes

_FIELD = re.compile(r"\s+(\w+)\s*:[^#]*(?:#\s*(.+?))?\s*$")
_COMMENT = re.compile(r"\s+#\s*(.+?)\s*$")
_PLAIN = (int, float, bool, str)
NONE = "none"  # this value means None instead of the default
_OLD_NAMES = {name.replace("_", "-"): option for name, option in OPTION_NAMES.items()}
# For typer: renamed options are also accepted by their old names, which help does not show.
CONTEXT_SETTINGS = {"token_normalize_func": lambda name: _OLD_NAMES.get(name, name)}


def command_from(run: Callable[..., None], *configs: type[Any]) -> Callable[..., None]:
    """Return a typer command whose options are the fields of `configs`; it calls `run` with one instance of each.

    A field that two configs share is one option for both. A field that is itself a dataclass gives one option per inner
    field, prefixed with the outer field's name.
    """

    def command(**values: Any) -> None:
        run(*(from_mapping(config, _collect(config, values)) for config in configs))

    parameters: dict[str, inspect.Parameter] = {}
    for config in configs:
        for parameter in _parameters(config):
            parameters.setdefault(parameter.name, parameter)
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    command.__doc__ = run.__doc__
    return command


def _collect(config: type[Any], values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of `config`'s fields as plain data, nested like the dataclasses."""
    hints, found = get_type_hints(config), {}
    for field in fields(config):
        name, hint = prefix + field.name, hints[field.name]
        nested = _is_nested(hint)
        found[field.name] = _collect(hint, values, name + "_") if nested else _value(name, hint, values[name])
    return found


def _value(name: str, hint: Any, value: Any) -> Any:
    """Return the value. Raise ConfigError, which lists the choices, if it is none of them."""
    base, optional = _without_none(hint)
    choices = _choices(base)
    if choices and value is not None and str(value) not in choices:
        raise ConfigError(f"--{option_name(name)} cannot be {value!r}; choose one of: {', '.join(choices)}", param=name)
    return None if value == NONE and base is str and optional else value


def _parameters(config: type[Any], prefix: str = "") -> list[inspect.Parameter]:
    hints, comments = get_type_hints(config), _comments(config)
    parameters: list[inspect.Parameter] = []
    own = list(inspect.get_annotations(config))  # its own fields first, as they are written, then inherited ones
    for field in sorted(fields(config), key=lambda each: own.index(each.name) if each.name in own else len(own)):
        name, hint = prefix + field.name, hints[field.name]
        if _is_nested(hint):
            parameters += _parameters(hint, name + "_")
        else:
            parameters.append(_parameter(name, field, hint, comments.get(field.name)))
    return parameters


def _parameter(name: str, field: Field[Any], hint: Any, help_text: str | None) -> inspect.Parameter:
    base, optional = _without_none(hint)
    choices = _choices(base)
    if choices:
        help_text = f"{help_text} ({' | '.join(choices)})" if help_text else " | ".join(choices)
    if base is str and optional and field.default is not None:
        help_text = f"{help_text} (or {NONE})" if help_text else f"or {NONE}"
    flag = option_name(name)
    kind = _option_type(base)
    option = typer.Option(
        f"--{flag}/--no-{flag}" if base is bool else f"--{flag}",
        help=help_text,
        hidden=field.metadata.get("hidden", False),
        **(_size_settings(field) if base is int and name.endswith("_nbytes") else {}),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=_default(field),
        annotation=Annotated[kind | None if optional else kind, option],
    )


def _size_settings(field: Field[Any]) -> dict[str, Any]:
    default = _default(field)
    shown = format_nbytes(default) if isinstance(default, int) else True
    return {"parser": _parse_size, "metavar": "SIZE", "show_default": shown}


def _parse_size(text: str | int) -> int:
    try:
        return parse_nbytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def _is_nested(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty


def _option_type(base: Any) -> Any:
    """Return the type that typer parses. All but plain types stay text until base/config.py checks them."""
    if get_origin(base) in (tuple, list):
        return list[str]
    return base if base in _PLAIN else str


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0], len(kinds) < len(get_args(hint))


def _choices(base: Any) -> list[str]:
    if get_origin(base) is Literal:
        return [str(value) for value in get_args(base)]
    if isinstance(base, type) and issubclass(base, StrEnum):
        return [member.value for member in base]
    return []


def _comments(config: type[Any]) -> dict[str, str]:
    """Return the fields' comments by field name, those of inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines() if is_dataclass(base) else ():
            if comment := _COMMENT.match(line):
                above.append(comment[1])
                continue
            field = _FIELD.match(line)
            if field and (field[2] or above):
                found[field[1]] = field[2] or " ".join(above)
            above = []
    return found
