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
from moonpool.launch.plan import Role, ServeConfig, plan_machine, plan_roles
from moonpool.launch.supervisor import ChildSpec, Ready, Start, Supervisor, Tick
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
    config = ServeConfig(**settings)
    return {role.name: role for role in plan_roles(config, plan_machine(config, num_cores=num_cores), RUN, STATE)}


def test_two_and_two() -> None:
    names = ["master", "node", "conductor", "prefill-0", "prefill-1", "decode-0", "decode-1", "frontend"]
    assert list(plan(prefill=2, decode=2)) == names


def test_several_nodes_and_front_ends() -> None:
    """The first of each keeps the name that it has alone."""
    roles = plan(nodes=3, frontends=2)
    names = ["master", "node", "node-1", "node-2", "conductor", "prefill-0", "decode-0", "frontend", "frontend-1"]
    assert list(roles) == names
    assert [roles[name].after for name in ("node", "node-1", "node-2")] == [("master",)] * 3, "each restarts on its own"
    assert roles["prefill-0"].first_after == ("conductor", "node", "node-1", "node-2")


def test_sizes_are_those_of_each_node_and_folders_are_apart() -> None:
    config = ServeConfig(nodes=2, dram="3GB", ssd="/ssd", ssd_size="5GB")
    config.check()
    machine = plan_machine(config, num_cores=2)
    assert config.pool_nbytes == machine.pool_nbytes == 6_000_000_000
    assert [part.dram_nbytes for part in machine.nodes] == [3_000_000_000] * 2
    assert [(part.ssd_dir, part.ssd_nbytes) for part in machine.nodes] == [
        ("/ssd", 5_000_000_000),
        ("/ssd/node-1", 5_000_000_000),
    ]
    assert machine.describe() == (
        "pool: 6 GB of memory and 10 GB of SSD in 2 nodes of 3 GB and 5 GB each (node, node-1); 1 front end"
    )


def test_front_ends_share_the_port_and_know_each_other() -> None:
    roles = plan(frontends=2, nodes=2)
    both = ("frontend=unix:/run/mp/frontend.sock", "frontend-1=unix:/run/mp/frontend-1.sock")
    for name in ("frontend", "frontend-1"):
        options = roles[name].options
        assert (options["name"], options["siblings"]) == (name, both)
        assert options["listen"] == "tcp:127.0.0.1:8000"
        assert options["expected_nodes"] == ("node", "node-1")
    assert "siblings" not in plan()["frontend"].options, "one front end has the port alone"


@pytest.mark.parametrize("name", ["master", "node", "node-1", "conductor", "prefill-0", "decode-0", "frontend-1"])
def test_every_option_is_known_to_its_role(name: str) -> None:
    role = plan(max_model_len=512, threads=2, tenants_file="/t.json", secret_file="/s", nodes=2, frontends=2)[name]
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
    roles = plan(prefill=2, decode=3, nodes=2, frontends=2).values()
    supervisor = Supervisor([ChildSpec(role.name, role.after, role.first_after, role.uses) for role in roles])
    started: list[str] = []
    new = [action.name for action in supervisor.handle(Tick(), 0.0) if isinstance(action, Start)]
    while new:
        started += new
        actions = [action for name in new for action in supervisor.handle(Ready(name), 0.0)]
        new = [action.name for action in actions if isinstance(action, Start)]
    assert sorted(started) == sorted(role.name for role in roles), "each is started once"
    assert supervisor.complete


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill": 0},
        {"decode": -1},
        {"nodes": 0},
        {"nodes": 1000},
        {"frontends": 0},
        {"port": 70000},
        {"dram": "0"},
        {"kv": "much"},
        {"threads": 0},
        {"policy": "best"},
        {"prefill": 2, "pipeline": 3},
        {"prefill": 2, "pipeline": 2, "pipeline_min_tokens": 0},
        {"pipeline_min_tokens": 1000},
        {"ttft_slo_s": 0.0},
        {"log_level": "X"},
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(**settings).check()


def test_the_conductor_knows_the_length_for_pipelines() -> None:
    settings: dict[str, Any] = {"prefill": 2, "pipeline": 2, "pipeline_min_tokens": 1000}
    ServeConfig(**settings).check()
    arguments = to_arguments(plan(**settings)["conductor"].options)
    assert arguments[arguments.index("--policy-pipeline-min-tokens") + 1] == "1000"


def test_options_become_arguments() -> None:
    options = {"run_dir": "/x", "threads": None, "num": 3, "verify": True, "shm": False}
    assert to_arguments(options) == ["--run-dir", "/x", "--num", "3", "--verify", "--no-shm"]


def test_restarted_workers_and_front_end_wait_for_nobody() -> None:
    """The pool and the conductor may be away for long; what is left of the service serves and says what is missing."""
    roles = plan()
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
