"""What the roles of a launcher get from their tables of the file, and from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.launch.child import to_arguments
from moonpool.launch.plan import Role, ServeConfig, plan_machine, plan_roles
from moonpool.launch.role_settings import child_environment, with_settings

TABLES = {"worker": {"pull_timeout_s": 5.0, "tcp_hosts": ["10.0.0.1", "10.1.0.1"], "nixl": True}}


def roles(tmp_path: Path) -> dict[str, Role]:
    config = ServeConfig()
    return {role.name: role for role in plan_roles(config, plan_machine(config, num_cores=2), tmp_path, tmp_path)}


def test_a_role_gets_the_options_of_its_table(tmp_path: Path) -> None:
    planned = roles(tmp_path)
    worker = with_settings(planned["decode-0"], TABLES, {})
    arguments = to_arguments(worker.options)
    assert arguments[arguments.index("--pull-timeout-s") + 1] == "5.0"
    assert arguments.count("--tcp-hosts") == 2
    assert "--nixl" in arguments
    assert with_settings(planned["master"], TABLES, {}) == planned["master"]


def test_the_environment_goes_over_the_table(tmp_path: Path) -> None:
    worker = with_settings(roles(tmp_path)["decode-0"], TABLES, {"MOONPOOL_PULL_TIMEOUT_S": "7"})
    assert "pull_timeout_s" not in worker.options, "the role reads the variable itself"


@pytest.mark.parametrize(("table", "key"), [("worker", "max_batch_tokens"), ("worker", "listen"), ("node", "dram")])
def test_what_the_launcher_sets_is_refused(tmp_path: Path, table: str, key: str) -> None:
    role = next(role for role in roles(tmp_path).values() if role.command == table)
    with pytest.raises(ConfigError, match=rf"\[{table}\]: {key} is set by the launcher"):
        with_settings(role, {table: {key: "1"}}, {})


def test_variables_do_not_reach_a_role_for_which_the_launcher_chose_the_default() -> None:
    options = {"max_batch_tokens": None, "threads": 2, "master_address": None}
    given = {
        "MOONPOOL_MAX_BATCH_TOKENS": "1",
        "MOONPOOL_MASTER": "tcp:a:1",
        "MOONPOOL_CONFIG": "/f",
        "MOONPOOL_CACHE": "/c",
        "MOONPOOL_LANES": "2",
    }
    assert child_environment(options, given) == {"MOONPOOL_CACHE": "/c", "MOONPOOL_LANES": "2"}
