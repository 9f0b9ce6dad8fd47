"""Command-line options from configuration dataclasses: each default is written once, in the dataclass.

A field `max_num_seqs: int = 8` becomes `--max-num-seqs INTEGER [default: 8]`. Its help is the comment behind the field,
or the comment lines above it. A field without a default is required; a tuple is an option that may be repeated; the
word `none` stands for None where a field may be None. A field in bytes (`dram_nbytes`) takes a size with a unit
(`64GB`). base/config.py checks the values, so a command line and a mapping follow the same types.

`serve` and the roles also take their settings from the environment and from a file (`-c`); base/settings.py has the
rule. A required setting may then come from any of the three.

Where base/config.py gives the option another name than the field's, the field's name is accepted too, but not shown.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from moonpool.base.config import OPTION_NAMES
from moonpool.base.config_file import CONFIG_VARIABLE, read_tables, table_of
from moonpool.base.errors import ConfigError
from moonpool.base.settings import (
    NONE,
    InForce,
    Layer,
    Setting,
    Source,
    build,
    from_environment,
    from_table,
    merge,
    settings_of,
)
from moonpool.base.units import exact_size, parse_nbytes
from moonpool.cli.option_groups import grouped

T = TypeVar("T")
_PLAIN = (int, float, bool, str)
_CONTEXT, _CONFIG = "ctx", "config"
_OLD_NAMES = {name.replace("_", "-"): option for name, option in OPTION_NAMES.items()}
# For typer: renamed options are also accepted by their old names, which help does not show.
CONTEXT_SETTINGS = {"token_normalize_func": lambda name: _OLD_NAMES.get(name, name)}

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="take settings from this file (docs/operations.md, `moonpool config init`); the command line and the "
        f"environment override it; default: ${CONFIG_VARIABLE}",
    ),
]


@dataclass(frozen=True, slots=True)
class Settled:
    """The settings of a command in force, and the file that some may come from; its tables, unchecked."""

    settings: Mapping[str, Setting]
    in_force: Mapping[str, InForce]
    path: Path | None = None
    tables: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def missing(self) -> list[Setting]:
        """The settings that must be given and are not."""
        return [setting for name, setting in self.settings.items() if name not in self.in_force]

    def build(self, config: type[T]) -> T:
        return build(config, self.in_force)


def command_from(run: Callable[..., None], *configs: type[Any]) -> Callable[..., None]:
    """Return a typer command whose options are the fields of `configs`; it calls `run` with one instance of each.

    A field that two configs share is one option for both. A field that is itself a dataclass gives one option per inner
    field, prefixed with the outer field's name.
    """
    settings = settings_of(*configs)

    def command(ctx: typer.Context, **values: Any) -> None:
        settled = Settled(settings, merge(settings, [_command_line(ctx, settings, values)]))
        run(*(settled.build(config) for config in configs))

    return _typed(command, [_parameter(each, None) for each in settings.values()], run.__doc__)


def layered_command(
    use: Callable[[Settled], None], table: str, *configs: type[Any], needs_all: bool = True
) -> Callable[..., None]:
    """As command_from, but settings also come from the environment and from the table of a file (`-c`). The command
    calls `use` with what is in force. With `needs_all` a required setting that is missing is a wrong command line."""
    settings = settings_of(*configs)

    def command(ctx: typer.Context, config: Path | None = None, **values: Any) -> None:
        given = _command_line(ctx, settings, values)
        settled = settle(settings, table, given, os.environ, chosen_file(config))
        if settled.missing and needs_all:
            ctx.fail(_how_to_give(settled.missing, table))
        use(settled)

    parameters = [_parameter(each, group) for group, members in grouped(settings).items() for each in members]
    parameters += [_parameter(each, None) for each in settings.values() if each.hidden]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters.append(inspect.Parameter(_CONFIG, keyword, default=None, annotation=ConfigOption))
    return _typed(command, parameters, use.__doc__)


def _how_to_give(missing: list[Setting], table: str) -> str:
    first, *others = missing
    also = f" Also missing: {', '.join(each.option for each in others)}." if others else ""
    return (
        f"Missing option '{first.option}'. Give it on the command line, as {first.variable} in the environment, or as "
        f"{first.key} in [{table}] of a file (-c).{also}"
    )


def chosen_file(given: Path | None) -> Path | None:
    """Return the file that the command line names, or else the environment."""
    named = os.environ.get(CONFIG_VARIABLE)
    return given or (Path(named) if named else None)


def settle(
    settings: Mapping[str, Setting], table: str, given: Layer, environment: Mapping[str, str], path: Path | None
) -> Settled:
    """Return the settings in force. Raise ConfigError if the environment or the file is wrong."""
    layers = [given, Layer(Source.ENVIRONMENT, from_environment(settings, environment))]
    if path is None:
        return Settled(settings, merge(settings, layers))
    tables = read_tables(path)
    values, faults = from_table(settings, table_of(tables, table, path))
    if faults:
        more = f" (and {len(faults) - 1} more; `moonpool config check {path}` lists them)" if faults[1:] else ""
        raise ConfigError(f"{path}: [{table}]: {faults[0]}{more}")
    layers.append(Layer(Source.FILE, values, f"[{table}] of {path}"))
    return Settled(settings, merge(settings, layers), path, tables)


def _command_line(ctx: typer.Context, settings: Mapping[str, Setting], values: Mapping[str, Any]) -> Layer:
    """Return what the user typed. Raise ConfigError, which lists the choices, for a value that is none of them."""
    typed = {}
    for name, setting in settings.items():
        source = ctx.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        try:
            typed[name] = setting.checked(values[name])
        except ConfigError as error:
            raise ConfigError(f"{setting.option} {error}", param=name) from error
    return Layer(Source.COMMAND_LINE, typed)


def _typed(command: Callable[..., None], parameters: list[inspect.Parameter], doc: str | None) -> Callable[..., None]:
    """Return the command with a signature from which typer makes the options."""
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    everything = [context, *parameters]
    command.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
    command.__doc__ = doc
    return command


def _parameter(setting: Setting, group: str | None) -> inspect.Parameter:
    """Return the option; without a `group` typer itself insists on required ones."""
    help_text, choices = setting.help, setting.choices
    if choices:
        help_text = f"{help_text} ({' | '.join(choices)})" if help_text else " | ".join(choices)
    if setting.kind is str and setting.may_be_none and setting.default is not None:
        help_text = f"{help_text} (or {NONE})" if help_text else f"or {NONE}"
    kind = _option_type(setting)
    optional = setting.may_be_none or (setting.is_required and group is not None)
    missing = None if group is not None else inspect.Parameter.empty
    option = typer.Option(
        f"{setting.option}/--no-{setting.option[2:]}" if setting.kind is bool else setting.option,
        help=help_text,
        hidden=setting.hidden,
        rich_help_panel=group,
        **_parsing(setting),
    )
    return inspect.Parameter(
        setting.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=missing if setting.is_required else setting.default,
        annotation=Annotated[kind | None if optional else kind, option],
    )


def _parsing(setting: Setting) -> dict[str, Any]:
    """Return how typer parses what is no plain type: sizes in bytes, and numbers that may be `none`."""
    if setting.kind is int and setting.is_size:
        shown = exact_size(setting.default) if isinstance(setting.default, int) else True
        return {"parser": _parser(setting, parse_nbytes), "metavar": "SIZE", "show_default": shown}
    if setting.is_size:
        return {"metavar": "SIZE"}
    if setting.kind in (int, float) and setting.may_be_none:
        return {"parser": _parser(setting, setting.kind), "metavar": f"<{setting.kind.__name__}>"}
    return {}


def _parser(setting: Setting, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    def parsed(text: Any) -> Any:
        if not isinstance(text, str) or (setting.may_be_none and text == NONE):
            return text
        try:
            return parse(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        except ValueError as error:
            what = "a whole number" if setting.kind is int else "a number"
            raise typer.BadParameter(f"{text!r} is not {what}") from error

    return parsed


def _option_type(setting: Setting) -> Any:
    """Return the type that typer parses. All but plain types stay text until base/config.py checks them."""
    if setting.is_list:
        return list[str]
    return setting.kind if setting.kind in _PLAIN else str
