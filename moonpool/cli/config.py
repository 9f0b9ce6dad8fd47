"""`moonpool config show|check|init`: the settings of `serve` and of all roles, and the file that they may come from.

`show COMMAND [OPTIONS]` prints what `moonpool COMMAND [OPTIONS]` would use, as a table of the file, and where each
value comes from; it starts nothing and prints no secret. `check FILE` prints everything that is wrong with a file.
`init` writes a file in which every setting is described and has its default, as a comment.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.base.config_file import CLUSTER, CONFIG_VARIABLE, MACHINES, ROLES, SERVE, read_tables
from moonpool.base.errors import ConfigError
from moonpool.base.settings import (
    InForce,
    Layer,
    Setting,
    Source,
    build,
    from_table,
    merge,
    settings_of,
    unknown_variables,
)
from moonpool.cli.option_groups import grouped
from moonpool.cli.options import CONTEXT_SETTINGS, ConfigOption, Settled, layered_command
from moonpool.cli.roles import configs_of
from moonpool.cli.up import MACHINE_VARIABLE, FileArgument, MachineOption, cluster_path, machine_name

_UP, _ALL = "up", "all"
_WITH_SETTINGS = (SERVE, *ROLES)
_OTHER_VARIABLES = (CONFIG_VARIABLE, MACHINE_VARIABLE, "MOONPOOL_CACHE", "MOONPOOL_API_KEY")
_WIDTH = 118
_HEAD = f"""\
# Settings of Moonpool, for `moonpool COMMAND -c FILE` or {CONFIG_VARIABLE}=FILE; `moonpool config check` checks them.
# A line with # right before a name has the default: remove the # and change the value. Lines without a value are
# required; they may be given elsewhere. The command line and the environment (MOONPOOL_DRAM for dram) override the
# file. Sizes are written "64GB", "512MB" or "2GiB"; "none" means no value. Relative paths count from the folder in
# which the command is started.
"""

command = typer.Typer(no_args_is_help=True)


@command.command(
    "show",
    help="Print the settings that a command would use, and where each comes from.",
    epilog="Examples:\n  moonpool config show serve -c moonpool.toml --dram 64GB\n"
    "  moonpool config show up cluster.toml --machine a",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def _show(
    name: Annotated[str, typer.Argument(metavar="COMMAND", help=f"one of {', '.join((*_WITH_SETTINGS, _UP))}")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS]...", help="what would follow the command, -c FILE too")
    ] = None,
) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT_SETTINGS)(_shower(name))
    app(arguments or [], prog_name=f"moonpool config show {name}")


def _shower(name: str) -> Callable[..., None]:
    """Return the command that shows the settings of that command: it has the same options."""
    if name == _UP:
        return _show_machine
    if name not in _WITH_SETTINGS:
        raise ConfigError(f"{name!r} has no settings to show; choose one of {', '.join((*_WITH_SETTINGS, _UP))}")

    def use(settled: Settled) -> None:
        print("\n".join([f"[{name}]", *shown_settings(settled.settings, settled.in_force)]))
        _print_unknown_variables(settled.settings)
        if not settled.missing:
            check_values(name, settled.in_force)

    return layered_command(use, name, *configs_of(name), needs_all=False)


def _show_machine(
    ctx: typer.Context, file: FileArgument = None, machine: MachineOption = None, config: ConfigOption = None
) -> None:
    from moonpool.launch.cluster_file import read_cluster

    found = read_cluster(cluster_path(ctx, file or config)).machine(machine_name(machine))
    settings = {name: each.setting for name, each in found.in_force.items()}
    print("\n".join([f"[{MACHINES}.{found.name}]", *shown_settings(settings, found.in_force)]))


def shown_settings(settings: Mapping[str, Setting], in_force: Mapping[str, InForce]) -> list[str]:
    """Return a line per setting: its value as in a file, and a comment that says where it comes from."""
    lines = []
    for setting in (each for members in grouped(dict(settings)).values() for each in members):
        found = in_force.get(setting.field)
        if found is None:
            text, source = f"# {setting.key} =", f"missing: give {setting.option}, {setting.variable} or {setting.key}"
        else:
            hides = setting.is_secret and found.value is not None
            text = f"{'# ' if hides else ''}{setting.key} = {setting.shown(found.value)}"
            where = setting.variable_in(os.environ) if found.source is Source.ENVIRONMENT else found.where
            source = f"{found.source} {where}".strip()
        lines.append(f"{text:<44}  # {source}")
    return lines


def _print_unknown_variables(settings: Mapping[str, Setting]) -> None:
    known = {*_OTHER_VARIABLES, *(setting.variable for setting in settings.values())}
    if not unknown_variables(os.environ, known):
        return
    for name in _WITH_SETTINGS:  # it may be a variable of another command
        known |= {setting.variable for setting in settings_of(*configs_of(name)).values()}
    for line in unknown_variables(os.environ, known):
        print(f"# {line}")


def check_values(name: str, in_force: Mapping[str, InForce]) -> None:
    """Raise ConfigError if the settings, right by themselves, are refused together."""
    for config in configs_of(name):
        made = build(config, in_force)
        if name == SERVE:
            made.check()


@command.command("check", help="Check a file; print everything that is wrong with it. Exit code 1 if something is.")
def _check(file: Annotated[Path, typer.Argument(help="the configuration or cluster file")]) -> None:
    tables = read_tables(file)
    faults = file_faults(tables)
    for fault in faults:
        print(f"{file}: {fault}", file=sys.stderr)
    if faults:
        raise typer.Exit(1)
    for name in _WITH_SETTINGS:
        if name in tables:
            print(f"[{name}]: {_summary(name, tables[name])}")
    if MACHINES in tables:
        print(f"[{CLUSTER}]: {len(tables[MACHINES])} machines: {', '.join(tables[MACHINES])}")
    print(f"{file} has no fault")


def _summary(name: str, table: Mapping[str, Any]) -> str:
    missing = [each.key for each in settings_of(*configs_of(name)).values() if each.is_required]
    missing = [key for key in missing if key not in table]
    others = f"; to be given elsewhere: {', '.join(missing)}" if missing else ""
    return f"{len(table)} {'setting' if len(table) == 1 else 'settings'}{others}"


def file_faults(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return everything that is wrong with the tables of a file, each with its table and key."""
    faults = []
    for name in (each for each in _WITH_SETTINGS if each in tables):
        settings = settings_of(*configs_of(name))
        values, wrong = from_table(settings, tables[name])
        in_force = merge(settings, [Layer(Source.FILE, values)])
        if not wrong and len(in_force) == len(settings):
            wrong = _refusals(partial(check_values, name, in_force))
        faults += [f"[{name}]: {fault}" for fault in wrong]
    if CLUSTER in tables or MACHINES in tables:
        from moonpool.launch.cluster_file import check_cluster

        faults += check_cluster(tables)[1]
    return faults or _launcher_faults(tables)


def _launcher_faults(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the settings of roles that the launcher sets itself, if the file is one for a launcher."""
    if not {SERVE, CLUSTER, MACHINES} & tables.keys() or not tables.keys() & set(ROLES):
        return []
    from moonpool.launch.plan import ServeConfig, plan_machine, plan_roles
    from moonpool.launch.role_settings import with_settings

    config, nowhere = ServeConfig(prefill=1, decode=0), Path("/")
    roles = plan_roles(config, plan_machine(config, num_cores=1), nowhere, nowhere)
    return [fault for role in roles for fault in _refusals(partial(with_settings, role, tables, {}))]


def _refusals(attempt: Callable[[], object]) -> list[str]:
    try:
        attempt()
    except ConfigError as error:
        return [str(error)]
    return []


@command.command("init", help="Write a file with every setting, its description and its default. Overwrites nothing.")
def _init(
    file: Annotated[Path, typer.Argument(help="the file to write")] = Path("moonpool.toml"),
    commands: Annotated[
        list[str] | None,
        typer.Option("--for", metavar="COMMAND", help=f"{', '.join(_WITH_SETTINGS)}, or {_ALL}; may be repeated"),
    ] = None,
) -> None:
    chosen = _WITH_SETTINGS if _ALL in (commands or []) else tuple(dict.fromkeys(commands or [SERVE]))
    unknown = [name for name in chosen if name not in _WITH_SETTINGS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join((*_WITH_SETTINGS, _ALL))}")
    text = default_file(chosen)
    try:
        with file.open("x") as written:
            written.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists; name another file, or move it away") from error
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
    print(f"wrote {file}; `moonpool {chosen[0]} -c {file}` uses it")


def default_file(commands: Iterable[str]) -> str:
    """Return a file with a table for each command, whose settings are comments."""
    return "\n".join([_HEAD, *(_default_table(name) for name in commands)])


def _default_table(name: str) -> str:
    lines = [f"[{name}]"]
    for group, members in grouped(settings_of(*configs_of(name))).items():
        lines += ["", f"# --- {group} ---"]
        for setting in members:
            choices = f" ({' | '.join(setting.choices)})" if setting.choices else ""
            lines += textwrap.wrap(
                f"{setting.help or setting.key}{choices}", _WIDTH - 2, initial_indent="# ", subsequent_indent="# "
            )
            lines.append(f"#{setting.key} = {'' if setting.is_required else setting.to_toml(setting.default)}".rstrip())
    return "\n".join([*lines, ""])
