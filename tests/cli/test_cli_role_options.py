"""The roles' options: one thing has one name at every role, sizes are written as people write them, old names work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.base.config import OPTION_NAMES
from moonpool.cli import main
from moonpool.cli.main import build_app
from moonpool.cli.options import command_from
from moonpool.conductor.service import ConductorConfig
from moonpool.frontend.service import FrontendConfig
from moonpool.node.config import NodeConfig
from moonpool.worker.config import WorkerConfig

CONFIGS: dict[str, type[Any]] = {
    "node": NodeConfig,
    "conductor": ConductorConfig,
    "worker": WorkerConfig,
    "frontend": FrontendConfig,
}

# role: the options that it must have, of those that several roles share
SHARED = {
    "master": {"--listen"},
    "node": {"--master", "--dram", "--ssd", "--ssd-size"},
    "conductor": {"--listen", "--master"},
    "worker": {"--listen", "--master", "--conductor", "--kv"},
    "frontend": {"--listen", "--master", "--conductor"},
    "serve": {"--dram", "--ssd", "--ssd-size", "--kv"},
}
NODE = ("--name", "n", "--run-dir", "/run/mp")
WORKER = ("--name", "w", "--role", "prefill", "--model", "m", "--run-dir", "/run/mp")


def parse(monkeypatch: pytest.MonkeyPatch, role: str, *arguments: str) -> Any:
    """Return the role's configuration made from that command line, without running the role."""
    seen: list[Any] = []
    command = command_from(seen.append, CONFIGS[role])
    monkeypatch.setattr(main, "load_command", lambda _: command)
    result = CliRunner().invoke(build_app(role), [role, *arguments])
    assert result.exit_code == 0, result.output
    return seen[0]


def help_of(role: str) -> str:
    result = CliRunner().invoke(build_app(role), [role, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("role", SHARED)
def test_help_shows_the_shared_names_alone(role: str) -> None:
    shown = set(re.findall(r"--[a-z-]+", help_of(role)))
    assert SHARED[role] <= shown
    assert not shown & {"--" + name.replace("_", "-") for name in OPTION_NAMES}


def test_sizes_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(
        monkeypatch, "node", *NODE, "--master", "tcp:a:1", "--dram", "64GB", "--ssd", "/d", "--ssd-size", "1TB"
    )
    assert (config.master_address, config.dram_nbytes) == ("tcp:a:1", 64_000_000_000)
    assert (config.ssd_dir, config.ssd_nbytes) == ("/d", 10**12)


def test_old_names_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ("--master-address", "tcp:a:1", "--dram-nbytes", "64000000000", "--ssd-dir=/d", "--ssd-nbytes", "1TB")
    new = ("--master", "tcp:a:1", "--dram", "64GB", "--ssd", "/d", "--ssd-size", "1TB")
    assert parse(monkeypatch, "node", *NODE, *old) == parse(monkeypatch, "node", *NODE, *new)


def test_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    new = ("--listen", "tcp:a:1", "--conductor", "tcp:b:2", "--master", "tcp:c:3", "--kv", "2GB")
    old = (
        "--address",
        "tcp:a:1",
        "--conductor-address",
        "tcp:b:2",
        "--master-address",
        "tcp:c:3",
        "--kv-nbytes",
        "2GB",
    )
    config = parse(monkeypatch, "worker", *WORKER, *new)
    assert (config.address, config.kv_nbytes) == ("tcp:a:1", 2_000_000_000)
    assert (config.conductor_address, config.master_address) == ("tcp:b:2", "tcp:c:3")
    assert parse(monkeypatch, "worker", *WORKER, *old) == config


def test_a_conductor(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(monkeypatch, "conductor", "--listen", "tcp:a:1", "--master", "tcp:b:2")
    assert (config.address, config.store_address) == ("tcp:a:1", "tcp:b:2")
    assert parse(monkeypatch, "conductor", "--address", "tcp:a:1", "--store-address", "tcp:b:2") == config


def test_a_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("--conductor", "tcp:b:2", "--state-dir", "/s")
    new = parse(monkeypatch, "frontend", *own, "--listen", "tcp:0.0.0.0:80")
    old = parse(monkeypatch, "frontend", *own, "--host", "0.0.0.0", "--port", "80")
    assert new.http_address == old.http_address
    assert str(new.http_address) == "tcp:0.0.0.0:80"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("node", *NODE, "--master", "tcp:a:1", "--dram", "lots"), "'lots' is not a size"),
        (("node", *NODE, "--dram", "1GB"), "Missing option '--master'"),
        (("worker", *WORKER, "--conductor", "tcp:b:2", "--master", "tcp:c:3"), "Missing option '--listen'"),
    ],
)
def test_refusals_name_the_option(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(build_app(arguments[0]), list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert says in result.output


def test_a_wrong_choice_names_the_right_ones() -> None:
    arguments = ["worker", *WORKER, "--listen", "tcp:a:1", "--conductor", "b", "--master", "c", "--dtype", "int8"]
    result = CliRunner().invoke(build_app("worker"), arguments)
    assert "--dtype cannot be 'int8'; choose one of: float32, bfloat16" in str(result.exception)
