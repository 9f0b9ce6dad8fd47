"""`moonpool config` and `-c` as a user types them; every setting of every command in a file and in the environment."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_cli import Command, forked_cli
from typer.testing import CliRunner

from moonpool.base.config_file import ROLES, SERVE
from moonpool.base.settings import Layer, Setting, Source, build, from_table, merge, settings_of
from moonpool.cli.config import default_file, shown_settings
from moonpool.cli.main import build_app
from moonpool.cli.option_groups import REQUIRED, group_of
from moonpool.cli.roles import configs_of

COMMANDS = (SERVE, *ROLES)
SETTING_LINE = re.compile(r"^#(\w+ =.*)$", re.MULTILINE)
CLUSTER = """
[cluster]
secret_file = "/etc/secret"
ttft_slo_s = 2.0
[machines.a]
host = "10.0.0.1"
master = true
prefill = 1
frontends = 1
dram = "64GB"
[machines.b]
host = "10.0.0.2"
decode = 1
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[Command]:
    with forked_cli("config", "up", "serve", "conductor") as moonpool:
        yield moonpool


@pytest.fixture
def moonpool(forked: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in a process of its own, without variables of ours from outside."""
    for name in [name for name in os.environ if name.startswith("MOONPOOL_")]:
        monkeypatch.delenv(name)
    return forked


def sample(setting: Setting) -> Any:
    """Return a value that is not the setting's default, as a file states it."""
    if setting.is_list:
        return ["a", "b"]
    if setting.kind is bool:
        return not setting.default
    if setting.choices:
        return next(each for each in setting.choices if each != setting.default)
    if setting.is_size:
        return "77MB"
    return 0.77 if setting.kind is float else 77 if setting.kind is int else "/some/text"


def here(command: str, *arguments: str, **environment: str) -> Any:
    """Run the command in this process, which takes less time than another one."""
    unset = dict.fromkeys(name for name in os.environ if name.startswith("MOONPOOL_"))
    runner = CliRunner(env={**unset, **environment})
    return runner.invoke(build_app(command), [command, *arguments])


def shown(command: str, *arguments: str, **environment: str) -> str:
    """Return what `config show` prints."""
    return str(here("config", "show", command, *arguments, **environment).output)


def line_of(output: str, setting: Setting) -> str:
    (line,) = re.findall(rf"^{setting.key} = .*$", output, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_is_reached_by_file_and_by_environment(command: str, tmp_path: Path) -> None:
    settings = [each for each in settings_of(*configs_of(command)).values() if not each.hidden]
    samples = {each.key: sample(each) for each in settings}
    lines = [f"{each.key} = {each.to_toml(samples[each.key])}" for each in settings]
    file = tmp_path / "moonpool.toml"
    file.write_text("\n".join([f"[{command}]", *lines]))
    texts = {key: ",".join(value) if isinstance(value, list) else str(value) for key, value in samples.items()}
    by_file = shown(command, "-c", str(file))
    by_variables = shown(command, **{each.variable: texts[each.key] for each in settings})
    for each, line in zip(settings, lines, strict=True):
        for output, source in (
            (by_file, f"file [{command}] of {file}"),
            (by_variables, f"environment {each.variable}"),
        ):
            value, where = line_of(output, each).split("  # ")
            assert (value.strip(), where) == (line, source)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_is_in_a_group_of_the_help(command: str) -> None:
    settings = settings_of(*configs_of(command)).values()
    assert not [each.key for each in settings if group_of(each) == "More" and not each.hidden]
    help_text = CliRunner().invoke(build_app(command), [command, "--help"], env={"COLUMNS": "200"}).output
    assert [
        f" {group_of(each)} " for each in settings if not each.hidden and f" {group_of(each)} " not in help_text
    ] == []
    assert "Examples:" in help_text
    assert any(each.is_required for each in settings) == (f" {REQUIRED} " in help_text)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_init_has_the_defaults_with_and_without_the_comment_signs(command: str) -> None:
    settings = settings_of(*configs_of(command))
    required = {each.field: each.from_file(sample(each)) for each in settings.values() if each.is_required}
    text = default_file([command])
    assert tomllib.loads(text) == {command: {}}, "as it is written, it changes nothing"
    lines = [line for line in SETTING_LINE.findall(text) if not line.endswith("=")]
    values, faults = from_table(settings, tomllib.loads("\n".join(lines)))
    assert not faults
    shown_fields = {each.field for each in settings.values() if not each.hidden}
    assert values.keys() | required.keys() == shown_fields, "every setting is described"
    for config in configs_of(command):
        default = build(config, merge(settings, [Layer(Source.COMMAND_LINE, required)]))
        assert (
            build(config, merge(settings, [Layer(Source.COMMAND_LINE, required), Layer(Source.FILE, values)]))
            == default
        )


def test_init_check_and_show_in_turn(moonpool: Command, tmp_path: Path) -> None:
    file = tmp_path / "moonpool.toml"
    made = moonpool("config", "init", str(file), "--for", "serve", "--for", "worker")
    assert (made.returncode, made.stdout.splitlines()[0]) == (0, f"wrote {file}; `moonpool serve -c {file}` uses it")
    checked = moonpool("config", "check", str(file))
    assert checked.returncode == 0
    assert checked.stdout.endswith(f"{file} has no fault\n")
    again = here("config", "init", str(file))
    assert str(again.exception) == f"{file} exists; name another file, or move it away"
    text = file.read_text().replace('#dram = "1GB"', 'dram = "2GB"').replace("#port = 8000", "port = 8001")
    file.write_text(text)
    found = moonpool("config", "show", "serve", "-c", str(file), "--port", "8002", MOONPOOL_KV="1GB", MOONPOOL_DRMA="")
    assert found.returncode == 0, found.stderr
    values = tomllib.loads(found.stdout)["serve"]
    assert (values["dram"], values["port"], values["kv"], values["prefill"]) == ("2GB", 8002, "1GB", 1)
    assert re.search(r"^port = 8002 +# command line$", found.stdout, re.MULTILINE)
    assert re.search(r"^kv = .1GB. +# environment MOONPOOL_KV$", found.stdout, re.MULTILINE)


def test_check_prints_every_fault(moonpool: Command, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        '[serve]\ndrma = "2GB"\nport = "x"\n[node]\nname = "n"\nmaster = "tcp:a:1"\nrun_dir = "/r"\ndram = "1"\n'
        "[machines.a]\nmaster = 3\nmodel = 'x'\ndecod = 1\n"
    )
    ran = moonpool("config", "check", str(file))
    assert (ran.returncode, ran.stdout) == (1, "")
    faults = [line.removeprefix(f"{file}: ") for line in ran.stderr.splitlines()]
    assert faults[:2] == [
        "[serve]: 'drma' is unknown; did you mean 'dram'?",
        "[serve]: port must be a whole number, not 'x'",
    ]
    assert faults[2].startswith("[node]: a node offers at least")
    assert [fault.split(": ", 1)[1].split(" ")[0] for fault in faults[3:]] == ["model", "master", "host", "'decod'"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[serv]\n", "'serv' is unknown; did you mean 'serve'?; the tables are [serve], [master]"),
        ("[serve\n", "is not TOML"),
        ("serve = 3\n", "[serve] must be a table"),
        (None, "cannot read"),
        ("[serve]\nprefill = 0\n", "at least one prefill"),
        ("[serve]\n[worker]\nmodel = 'x'\n", "[worker]: model is set by the launcher"),
        (CLUSTER.replace("decode = 1", ""), "no machine has decode"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "f.toml"
    if text is not None:
        file.write_text(text)
    result = here("config", "check", str(file))
    assert result.exit_code == 1
    assert says in f"{result.output}{result.exception}"


def test_a_cluster_file_is_checked_and_shown(moonpool: Command, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER + "[worker]\npull_timeout_s = 5.0\n")
    assert here("config", "check", str(file)).exit_code == 0
    found = shown("up", str(file), "--machine", "b")
    assert re.search(r"^decode = 1 +# file \[machines.b\]$", found, re.MULTILINE)
    assert re.search(r"^ttft_slo_s = 2.0 +# file \[cluster\]$", found, re.MULTILINE)
    assert re.search(r"^prefill = 0 +# default$", found, re.MULTILINE)
    assert shown("up", MOONPOOL_CONFIG=str(file), MOONPOOL_MACHINE="b") == found
    by_variable = moonpool("up", "--check", MOONPOOL_CONFIG=str(file))
    assert (by_variable.returncode, by_variable.stdout) == (0, here("up", str(file), "--check").stdout)
    refused = moonpool("serve", "-c", str(file))
    assert refused.returncode == 1
    assert "has no table [serve]" in refused.stderr
    assert f"`moonpool up {file}`" in refused.stderr


def test_up_without_a_file_is_a_wrong_command_line() -> None:
    ran = here("up")
    assert ran.exit_code == 2
    assert "Name the cluster file" in ran.output


def test_a_missing_setting_says_where_it_may_be_given() -> None:
    ran = here("node", "--dram", "1GB", COLUMNS="300")
    assert ran.exit_code == 2
    assert "Missing option '--name'" in ran.output
    assert "MOONPOOL_NAME" in ran.output
    assert "Also missing: --master, --run-dir" in ran.output


def test_a_role_takes_its_settings_from_a_file_and_the_environment(moonpool: Command, tmp_path: Path) -> None:
    """The process gets as far as the bad address, which only the variable states."""
    file = tmp_path / "moonpool.toml"
    file.write_text('[conductor]\nlisten = "tcp:127.0.0.1:0"\npolicy_name = "local"\n')
    ran = moonpool("conductor", "-c", str(file), MOONPOOL_LISTEN="nonsense")
    assert ran.returncode == 1
    assert ran.stderr.startswith("moonpool conductor: 'nonsense' is not an address")
    file.write_text('[conductor]\npolicy_name = "guess"\n')
    assert "policy 'guess' is none of" in str(here("conductor", "-c", str(file)).exception)
    file.write_text('[conductor]\npolicy_nam = "local"\n')
    refused = here("conductor", "-c", str(file))
    assert "[conductor]: 'policy_nam' is unknown; did you mean 'policy_name'?" in str(refused.exception)


def test_no_value_is_said_by_name_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "moonpool.toml"
    file.write_text("[serve]\nmax_model_len = 100\n")
    setting = settings_of(*configs_of(SERVE))["max_model_len"]
    arguments = ("-c", str(file))
    assert line_of(shown(SERVE, *arguments), setting).startswith("max_model_len = 100 ")
    assert line_of(shown(SERVE, *arguments, "--max-model-len", "none"), setting).startswith('max_model_len = "none"')
    assert line_of(shown(SERVE, *arguments, MOONPOOL_MAX_MODEL_LEN="none"), setting).startswith(
        'max_model_len = "none"'
    )


@dataclass(frozen=True)
class WithSecret:
    api_key: str | None = None
    name: str = "x"


def test_show_prints_no_secret() -> None:
    settings = settings_of(WithSecret)
    lines = shown_settings(settings, merge(settings, [Layer(Source.FILE, {"api_key": "sk-123"}, "[serve]")]))
    assert [" ".join(line.split()) for line in sorted(lines)] == [
        "# api_key = (set, not shown) # file [serve]",
        'name = "x" # default',
    ]
