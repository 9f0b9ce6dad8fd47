"""`moonpool mooncake`: programs written for Mooncake, on Moonpool.

Mooncake's wheel owns the module name `mooncake`. So ours is found only by programs that ask for it: by `run`, or by the
folder that `path` prints on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import ConfigError
from moonpool.base.process import ProcessConfig, run_role
from moonpool.integrations.mooncake import shadow_path

command = typer.Typer(no_args_is_help=True)
_OWN_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": list[str]()}
_PROGRAM = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
_MASTER_SUMMARY = (
    "The master of a Moonpool pool with the flags of mooncake_master. It listens on the loopback interface unless told "
    "otherwise (upstream: on all interfaces). Without --data_dir a restarted master knows no objects, as upstream."
)
_CLIENT_SUMMARY = (
    "Offers memory of this machine to the pool, with the flags of mooncake_client. Processes of this machine map it; "
    "others reach it by tcp. MOONPOOL_SECRET_FILE and MOONPOOL_TLS_*_FILE guard its port."
)
ForceOption = Annotated[bool, typer.Option("--force", help="hide an installed Mooncake")]


@command.command()
def path(force: ForceOption = False) -> None:
    """Print the folder for PYTHONPATH with which `import mooncake` finds Moonpool: see docs/mooncake.md."""
    check_not_installed(force)
    print(shadow_path())


@command.command(context_settings=_PROGRAM)
def run(context: typer.Context, program: str, force: ForceOption = False) -> None:
    """Run a program with Moonpool as its `mooncake`: a Python file, `-m module`, or a command such as vllm."""
    check_not_installed(force)
    arguments = [program, *context.args]
    if program == "-m" or program.endswith(".py"):
        arguments = [sys.executable, *arguments]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([shadow_path(), *([before] if before else [])])
    try:
        os.execvp(arguments[0], arguments)
    except OSError as error:
        raise ConfigError(f"{arguments[0]!r} cannot be run: {error.strerror}") from error


@command.command(context_settings=_OWN_FLAGS, add_help_option=False)
def master(context: typer.Context) -> None:
    """Run the pool's master with the flags of mooncake_master; --help lists them."""
    from moonpool.integrations.mooncake.master_flags import MASTER_FLAGS, master_config, with_config_file
    from moonpool.integrations.mooncake.mooncake_master import MooncakeMaster

    parsed = MASTER_FLAGS.parse(context.args)
    if parsed.wants_help:
        print(MASTER_FLAGS.usage("moonpool mooncake master", _MASTER_SUMMARY))
        return
    parsed = MASTER_FLAGS.parse(with_config_file(context.args))
    config = master_config(parsed)
    _report_ignored(parsed.ignored)
    journal = f"its journal in {config.data_dir}" if config.data_dir else "no journal"
    process = ProcessConfig(log_level=config.log_level)
    run_role("master", lambda: MooncakeMaster(config), process, what=f"Mooncake master with {journal}")


@command.command(context_settings=_OWN_FLAGS, add_help_option=False)
def client(context: typer.Context) -> None:
    """Offer memory to the pool with the flags of mooncake_client; --help lists them."""
    from moonpool.integrations.mooncake.client_flags import CLIENT_FLAGS
    from moonpool.integrations.mooncake.mooncake_client import MooncakeClient

    parsed = CLIENT_FLAGS.parse(context.args)
    if parsed.wants_help:
        print(CLIENT_FLAGS.usage("moonpool mooncake client", _CLIENT_SUMMARY))
        return
    _report_ignored(parsed.ignored)
    what = f"{parsed.text('global_segment_size')} of memory for the pool of {parsed.text('master_server_address')}"
    run_role("client", lambda: MooncakeClient(parsed), ProcessConfig(log_level=parsed.text("log_level")), what=what)


def check_not_installed(force: bool) -> None:
    """Raise ConfigError when another package `mooncake` would be hidden, unless `force`."""
    other = installed_mooncake()
    if other is not None and not force:
        raise ConfigError(
            f"a package named mooncake is installed in {other}, and ours would hide it; repeat with --force to use "
            "Moonpool's, or run the program without moonpool to use the installed one"
        )


def installed_mooncake() -> str | None:
    """Return the folder of a package `mooncake` that is not ours; None when there is none."""
    own = Path(shadow_path())
    for folder in dict.fromkeys(sys.path):
        place = Path(folder or ".").resolve()
        if place != own and (place / "mooncake" / "__init__.py").exists():
            return str(place / "mooncake")
    return None


def _report_ignored(ignored: Mapping[str, str]) -> None:
    for name, reason in ignored.items():
        print(f"moonpool: --{name} has no effect: {reason}", file=sys.stderr)
