"""The `moonpool` command. It has the name and one line of help of every command, and imports only the one that runs.

Exit codes: 0 done, 1 failed (the reason is printed in one line), 2 wrong command line, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from moonpool import __version__
from moonpool.base.errors import MoonpoolError
from moonpool.base.limits import memory_shortage, require_address_space_to_start
from moonpool.base.process import watch_inherited
from moonpool.cli.options import CONTEXT_SETTINGS
from moonpool.cli.roles import EXAMPLES

# name: (module with `command`, or module:function that returns the command; what `moonpool --help` says)
COMMANDS = {
    "serve": ("moonpool.cli.roles:serve", "Start everything on this machine and serve the OpenAI API."),
    "up": ("moonpool.cli.up", "Start this machine's part of a cluster that a file describes."),
    "chat": ("moonpool.cli.chat", "Talk to a running server in the terminal."),
    "model": ("moonpool.cli.model", "Fetch and list models."),
    "master": ("moonpool.cli.roles:master", "Run the pool's master: it knows where objects are."),
    "node": ("moonpool.cli.roles:node", "Run a node: it gives memory of this machine to the pool."),
    "conductor": ("moonpool.cli.roles:conductor", "Run the conductor: it chooses the workers of each request."),
    "worker": ("moonpool.cli.roles:worker", "Run a prefill or decode worker."),
    "frontend": ("moonpool.cli.roles:frontend", "Run the OpenAI front end."),
    "config": ("moonpool.cli.config", "Show, check and write configuration files for serve and all roles."),
    "put": ("moonpool.cli.put", "Store a file in the pool."),
    "get": ("moonpool.cli.get", "Read an object from the pool."),
    "ls": ("moonpool.cli.ls", "List the objects of the pool."),
    "rm": ("moonpool.cli.rm", "Remove objects from the pool."),
    "stat": ("moonpool.cli.stat", "Show the state of the pool: usage, hit rate, tasks, workers."),
    "top": ("moonpool.cli.top", "Show what a running service does: load, tokens, workers, nodes, requests."),
    "role": ("moonpool.cli.role", "Change what a running worker computes: prefill, decode, or as the load needs."),
    "scale": ("moonpool.cli.scale", "Change how many prefill and decode workers a running service has here."),
    "drain": ("moonpool.cli.drain", "Empty a worker or a node, so that it can be stopped without loss."),
    "why": ("moonpool.cli.why", "Explain what happened to a request, or to a key of the pool."),
    "trace": ("moonpool.cli.trace", "Describe, generate and change request traces."),
    "plan": ("moonpool.cli.plan", "Size a cluster and its pool for a trace; without one, show a model's KV sizes."),
    "replay": ("moonpool.cli.replay", "Replay a trace on simulated machines and compare systems."),
    "bench": ("moonpool.cli.bench", "Measure transfers and the pool on this machine."),
    "mooncake": ("moonpool.cli.mooncake", "Run programs written for Mooncake on Moonpool, and its master and client."),
    "doctor": ("moonpool.cli.doctor", "Check this machine: what works, what is missing, how to fix it."),
}

_NAMES_OF_SETTINGS = (
    "Every option may also be set in the environment (MOONPOOL_LOG_LEVEL for --log-level) and in a file (log_level); "
    "`moonpool config show` says what is in force."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit. A MoonpoolError is printed as one line, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = next((text for text in arguments if not text.startswith("-")), None)
    try:
        require_address_space_to_start()
        watch_inherited()
        build_app(wanted)(arguments, prog_name="moonpool")
    except MoonpoolError as error:
        _fail(wanted, str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "moonpool":
            raise
        _fail(wanted, f"the Python package {error.name!r} is missing; install it with: pip install 'moonpool[all]'")
    except (MemoryError, OSError, ImportError, RuntimeError) as error:
        shortage = memory_shortage(error)
        if shortage is None:
            raise
        _fail(wanted, shortage)


def build_app(wanted: str | None) -> typer.Typer:
    """Return the application with `wanted` in full and all other commands as one line of help each."""
    app = typer.Typer(
        name="moonpool",
        help="KVCache-centric LLM serving: separate prefill and decode workers, one pool of reusable KV.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name, (module, summary) in COMMANDS.items():
        command = load_command(module) if name == wanted else _not_loaded
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=summary)
        else:
            app.command(name, help=summary, epilog=_examples(name), context_settings=CONTEXT_SETTINGS)(command)
    return app


def _examples(name: str) -> str | None:
    """Return what `--help` of the command ends with."""
    lines = [f"  {line}" for line in EXAMPLES.get(name, ())]
    if not lines:
        return None
    names = () if name == "up" else (_NAMES_OF_SETTINGS, "")
    return "\n".join((*names, "Examples:", *lines))


def load_command(place: str) -> typer.Typer | Callable[..., None]:
    """Return the command at a place of COMMANDS."""
    module, _, function = place.partition(":")
    loaded = importlib.import_module(module)
    command: typer.Typer | Callable[..., None] = getattr(loaded, function)() if function else loaded.command
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"moonpool {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def _not_loaded() -> None:
    raise AssertionError("a command that was not asked for cannot run")


def _fail(command: str | None, message: str) -> None:
    print(f"moonpool {command}: {message}" if command else f"moonpool: {message}", file=sys.stderr)
    sys.exit(1)
