"""The `moonpool` command as a user types it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from waiting import HANG_S

from moonpool import __version__
from moonpool.cli.main import COMMANDS, build_app, load_command, main


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


LOOK = """
import sys
from moonpool.cli.main import main
for arguments in (["--help"], *([name, "--help"] for name in sys.argv[1:])):
    print("asked:", *arguments)
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, arguments
    loaded = {"torch", "transformers"} & sys.modules.keys()
    assert not loaded, f"{arguments} loads {loaded}"
"""


def test_no_command_needs_torch_to_explain_itself() -> None:
    """One process asks one command after the other: the first that loads torch is named."""
    ran = subprocess.run([sys.executable, "-c", LOOK, *COMMANDS], capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 0, ran.stderr
    _, *helps = ran.stdout.split("asked: ")
    assert [each.splitlines()[0] for each in helps] == ["--help", *(f"{name} --help" for name in COMMANDS)]
    assert all("Usage" in each for each in helps)


@pytest.mark.parametrize("arguments", [("nope",), ("conductor", "--nope"), ("worker",)])
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:  # in this process: a usage error comes before anything is set up
        main(arguments)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


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
