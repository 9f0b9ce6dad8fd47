"""Options derived from dataclasses: names, types, defaults, help, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import ConfigError
from moonpool.cli.options import command_from


@dataclass(frozen=True, slots=True)
class Inner:
    rate_s: float | None = None  # seconds between looks


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str  # who it is
    role: WorkerRole = WorkerRole.PREFILL
    dtype: Literal["float32", "bfloat16"] = "float32"
    # how many
    # at once
    max_num_seqs: int = 8
    threads: int | None = None
    verify: bool = True
    tags: tuple[str, ...] = ()
    policy: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Shared:
    name: str = "other"
    log_level: str = "INFO"


def run(*arguments: str) -> tuple[Any, list[Any]]:
    seen: list[Any] = []
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command_from(lambda *configs: seen.extend(configs), Config, Shared))
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result, seen


def test_defaults_are_the_dataclass_own() -> None:
    result, seen = run("--name", "a")
    assert result.exit_code == 0, result.output
    assert seen == [Config(name="a"), Shared(name="a")]


def test_every_kind_of_field() -> None:
    result, seen = run(
        *("--name", "a", "--role", "decode", "--dtype", "bfloat16", "--max-num-seqs", "3", "--threads", "2"),
        *("--no-verify", "--tags", "x", "--tags", "y", "--policy-rate-s", "0.5", "--log-level", "DEBUG"),
    )
    assert result.exit_code == 0, result.output
    config = seen[0]
    assert config.role is WorkerRole.DECODE
    assert config == Config(
        name="a",
        role=WorkerRole.DECODE,
        dtype="bfloat16",
        max_num_seqs=3,
        threads=2,
        verify=False,
        tags=("x", "y"),
        policy=Inner(0.5),
    )
    assert seen[1] == Shared("a", "DEBUG")


def test_help_comes_from_comments_and_choices() -> None:
    result, _ = run("--help")
    for text in ("who it is", "how many at once", "seconds between looks", "float32 | bfloat16", "prefill | decode"):
        assert text in result.output


@pytest.mark.parametrize(
    "arguments", [("--name", "a", "--nope", "1"), ("--name", "a", "--max-num-seqs", "many"), (), ("--name", "a", "b")]
)
def test_a_wrong_command_line_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    result, seen = run(*arguments)
    assert result.exit_code == 2
    assert not seen


def test_a_value_outside_the_choices_is_a_config_error() -> None:
    result, _ = run("--name", "a", "--dtype", "int3")
    assert isinstance(result.exception, ConfigError)


@dataclass(frozen=True, kw_only=True)
class Wires:
    host: str | None = "127.0.0.1"  # where to listen
    hosts: tuple[str, ...] = ()
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Role(Wires):
    title: str  # its own
    nothing: str = "x"


def run_role(*arguments: str) -> tuple[Any, list[Any]]:
    seen: list[Any] = []
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command_from(seen.append, Role))
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"}), seen


def test_none_is_said_by_name() -> None:
    result, seen = run_role("--title", "none", "--host", "none", "--file", "none", "--nothing", "none")
    assert result.exit_code == 0, result.output
    assert seen == [Role(title="none", host=None, nothing="none")], "a text that may not be None stays one"


def test_a_tuple_is_an_option_to_repeat() -> None:
    assert run_role("--title", "a", "--hosts", "10.0.0.1", "--hosts", "10.1.0.1")[1][0].hosts == (
        "10.0.0.1",
        "10.1.0.1",
    )


def test_own_fields_come_before_inherited_ones_in_the_help() -> None:
    text = run_role("--help")[0].output
    assert text.index("--title") < text.index("--host")
    assert "where to listen (or none)" in text
