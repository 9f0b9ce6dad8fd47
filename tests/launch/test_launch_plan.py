"""What is started, with which options, after what."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.config import from_mapping
from moonpool.base.errors import ConfigError
from moonpool.base.process import ProcessConfig
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.service import ConductorConfig
from moonpool.frontend.service import FrontendConfig
from moonpool.launch.child import to_arguments
from moonpool.launch.plan import Role, ServeConfig, plan_roles
from moonpool.launch.supervisor import ChildSpec, Supervisor
from moonpool.master.service import MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.worker.config import WorkerConfig

CONFIGS: dict[str, type[Any]] = {
    "master": MasterConfig,
    "node": NodeConfig,
    "conductor": ConductorConfig,
    "worker": WorkerConfig,
    "frontend": FrontendConfig,
}
RUN, STATE = Path("/run/mp"), Path("/state")


def plan(num_cores: int = 4, **settings: Any) -> dict[str, Role]:
    return {role.name: role for role in plan_roles(ServeConfig(**settings), RUN, STATE, num_cores=num_cores)}


def test_two_and_two() -> None:
    names = ["master", "node", "conductor", "prefill-0", "prefill-1", "decode-0", "decode-1", "frontend"]
    assert list(plan(prefill=2, decode=2)) == names


@pytest.mark.parametrize("name", ["master", "node", "conductor", "prefill-0", "decode-0", "frontend"])
def test_every_option_is_known_to_its_role(name: str) -> None:
    role = plan(max_model_len=512, threads=2, tenants_file="/t.json", secret_file="/s")[name]
    config, process = CONFIGS[role.command], {field.name for field in fields(ProcessConfig)}
    own = {field.name for field in fields(config)}
    options = {key: value for key, value in role.options.items() if not key.startswith("policy_")}
    assert set(options) <= own | process
    from_mapping(config, {key: value for key, value in options.items() if key in own})
    policy = {key.removeprefix("policy_"): role.options[key] for key in role.options.keys() - options.keys()}
    from_mapping(PolicyConfig, policy)


def test_roles_find_each_other() -> None:
    roles = plan(dram="2GB", kv="100MB")
    worker = roles["prefill-0"].options
    assert worker["master_address"] == roles["master"].options["listen"] == "unix:/run/mp/master.sock"
    assert worker["conductor_address"] == roles["conductor"].options["address"]
    assert roles["frontend"].options["conductor_address"] == worker["conductor_address"]
    assert worker["kv_nbytes"] == 100_000_000
    assert roles["node"].options["dram_nbytes"] == 2_000_000_000


@pytest.mark.parametrize(
    ("num_cores", "settings", "threads"),
    [
        (2, {"prefill": 2, "decode": 2}, [1, 1, 1, 1]),  # never none
        (7, {"prefill": 1, "decode": 2}, [3, 2, 2]),  # what is left over goes to prefill first
        (64, {}, [32, 32]),
        (64, {"threads": 5}, [5, 5]),
    ],
)
def test_the_workers_share_the_cores(num_cores: int, settings: dict[str, Any], threads: list[int]) -> None:
    roles = plan(num_cores, **settings).values()
    assert [role.options["threads"] for role in roles if role.command == "worker"] == threads


def test_the_secret_goes_to_those_who_listen() -> None:
    with_secret = {name for name, role in plan(secret_file="/s").items() if role.options.get("secret_file") == "/s"}
    assert with_secret == {"node", "prefill-0", "decode-0"}
    assert not any("--secret-file" in to_arguments(role.options) for role in plan().values())


def test_the_pool_has_a_tcp_port_only_behind_a_secret() -> None:
    assert plan()["node"].options["tcp_host"] == "none"
    assert plan(secret_file="/s")["node"].options["tcp_host"] is None  # the node's own default, with the secret
    assert not any("tcp_host" in role.options for name, role in plan().items() if name != "node")
    assert WorkerConfig.tcp_host is None


def test_the_plan_can_be_supervised() -> None:
    roles = plan(prefill=2, decode=3).values()
    Supervisor([ChildSpec(role.name, role.after, role.first_after, role.uses) for role in roles])


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill": 0},
        {"decode": -1},
        {"port": 70000},
        {"dram": "0"},
        {"kv": "much"},
        {"threads": 0},
        {"policy": "best"},
        {"ttft_slo_s": 0.0},
        {"log_level": "X"},
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(**settings).check()


def test_options_become_arguments() -> None:
    options = {"run_dir": "/x", "threads": None, "num": 3, "verify": True, "shm": False}
    assert to_arguments(options) == ["--run-dir", "/x", "--num", "3", "--verify", "--no-shm"]


def test_restarted_workers_and_front_end_wait_for_nobody(tmp_path: Path) -> None:
    """The pool and the conductor may be away for long; what is left of the service serves and says what is missing."""
    roles = {role.name: role for role in plan_roles(ServeConfig(), tmp_path, tmp_path, num_cores=2)}
    for name in ("prefill-0", "decode-0", "frontend", "conductor"):
        assert roles[name].after == ()
    assert roles["frontend"].options["expected_workers"] == ("prefill-0", "decode-0")
    arguments = to_arguments(roles["frontend"].options)
    assert arguments[arguments.index("--expected-workers") :][:4] == [
        "--expected-workers",
        "prefill-0",
        "--expected-workers",
        "decode-0",
    ]
