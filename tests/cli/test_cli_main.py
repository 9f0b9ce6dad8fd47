"""The `moonpool` command as a user types it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from waiting import HANG_S

from moonpool import __version__
from moonpool.cli.main import COMMANDS, build_app, load_command


def moonpool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments], capture_output=True, text=True, timeout=HANG_S
    )


def test_version() -> None:
    ran = moonpool("--version")
    assert (ran.returncode, ran.stdout) == (0, f"moonpool {__version__}\n")


def test_help_names_every_command() -> None:  # and is quick: benchmarks/start_up.py
    ran = moonpool("--help")
    assert ran.returncode == 0
    assert all(name in ran.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_no_command_needs_torch_to_explain_itself(command: str | None) -> None:
    arguments = ["--help"] if command is None else [command, "--help"]
    code = f"import sys; from moonpool.cli.main import main\ntry: main({arguments!r})\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 0, ran.stderr
    assert "Usage" in ran.stdout


@pytest.mark.parametrize("arguments", [("nope",), ("conductor", "--nope"), ("worker",)])
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    ran = moonpool(*arguments)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr


def test_an_error_on_purpose_is_one_line() -> None:
    ran = moonpool("conductor", "--address", "nonsense")
    assert ran.returncode == 1
    assert ran.stderr.startswith("moonpool conductor: 'nonsense' is not an address")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_module_offers_a_command(name: str) -> None:
    command = load_command(COMMANDS[name][0])
    assert isinstance(command, typer.Typer) or callable(command)
    build_app(name)
