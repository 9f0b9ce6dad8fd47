"""The cluster file: what it may say, and what each mistake is told."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import ConfigError
from moonpool.launch.cluster_file import parse_cluster, read_cluster
from moonpool.launch.plan import plan_machine, plan_roles

TEXT = """
[cluster]
model = "smollm2"
secret_file = "/etc/secret"
ttft_slo_s = 2.0
kv = "1GB"

[machines.a]
host = "10.0.0.1"
master = true
prefill = 2
frontends = 1
dram = "64GB"

[machines.b]
host = "10.0.0.2"
decode = 1
kv = "2GB"
dram = "32GB"
nodes = 2
"""


def given(**changes: Any) -> dict[str, Any]:
    """The file's tables, with `table__key=value` changed; None removes the key, and a whole table by its name alone."""
    tables = copy.deepcopy(tomllib.loads(TEXT))
    for path, value in changes.items():
        *folders, key = path.split("__")
        table = tables
        for name in folders:
            table = table[name]
        if value is None:
            del table[key]
        else:
            table[key] = value
    return tables


def test_each_machine_has_its_own_part() -> None:
    cluster = parse_cluster(given())
    a, b = cluster.machine("a"), cluster.machine("b")
    assert (a.worker_names, a.node_names) == (("a-prefill-0", "a-prefill-1"), ("a-node",))
    assert (b.worker_names, b.node_names) == (("b-decode-0",), ("b-node", "b-node-1"))
    assert (a.serve.kv, b.serve.kv) == ("1GB", "2GB"), "a machine's option overrides the cluster's"
    assert a.serve.ttft_slo_s == b.serve.ttft_slo_s == 2.0
    assert (b.serve.prefill, b.serve.frontends) == (0, 0), "what is not named is not there"
    assert cluster.master_address == "tcp:10.0.0.1:7700"


def test_the_roles_of_a_machine_find_those_of_the_others(tmp_path: Path) -> None:
    cluster = parse_cluster(given())
    names: dict[str, list[str]] = {}
    for name, machine in cluster.machines.items():
        plan = plan_machine(machine.serve, num_cores=4, prefix=machine.prefix)
        roles = plan_roles(machine.serve, plan, tmp_path, tmp_path, cluster.wiring(machine))
        names[name] = [role.name for role in roles]
        here = set(names[name])
        for role in roles:
            assert {*role.after, *role.first_after, *role.uses} <= here, "waits for roles of its own machine alone"
            if role.command == "worker":
                assert role.options["address"] == f"tcp:{machine.host}:0"
                assert role.options["tcp_host"] == machine.host
                assert role.options["conductor_address"] == "tcp:10.0.0.1:7800"
            if role.command == "frontend":
                assert role.options["expected_workers"] == ("a-prefill-0", "a-prefill-1", "b-decode-0")
                assert role.options["expected_nodes"] == ("a-node", "b-node", "b-node-1")
    assert names == {
        "a": ["master", "a-node", "conductor", "a-prefill-0", "a-prefill-1", "frontend"],
        "b": ["b-node", "b-node-1", "b-decode-0"],
    }


def test_conductors_may_be_on_several_machines(tmp_path: Path) -> None:
    cluster = parse_cluster(given(machines__a__conductors=2, machines__b__conductors=1))
    everyone = "tcp:10.0.0.1:7800,tcp:10.0.0.1:7801,tcp:10.0.0.2:7800"
    assert cluster.conductor_address == everyone
    for name, expected in (("a", ["conductor", "conductor-1"]), ("b", ["conductor"])):
        machine = cluster.machine(name)
        plan = plan_machine(machine.serve, num_cores=4, prefix=machine.prefix)
        roles = plan_roles(machine.serve, plan, tmp_path, tmp_path, cluster.wiring(machine))
        assert [role.name for role in roles if role.command == "conductor"] == expected
        assert {role.options["conductor_address"] for role in roles if role.command == "worker"} == {everyone}
    with pytest.raises(ConfigError, match="no machine has conductors"):
        parse_cluster(given(machines__a__conductors=0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": {}}, "'machine' is unknown; did you mean 'machines'?"),
        ({"cluster__modell": "x"}, r"\[cluster\]: 'modell' is unknown; did you mean 'model'?"),
        ({"cluster__prefill": 1}, r"\[cluster\]: 'prefill' is unknown"),
        ({"machines__b__decod": 1}, r"\[machines.b\]: 'decod' is unknown; did you mean 'decode'?"),
        ({"machines__b__model": "x"}, "model is the same for all machines"),
        ({"machines__b__host": None}, "host is missing"),
        ({"machines__b__decode": "1"}, r"\[machines.b\]: decode must be a whole number, not '1'"),
        ({"machines__b__decode": -1}, "decode must be 0 to 64"),
        ({"machines__b__dram": "much"}, r"\[machines.b\]: .*much"),
        ({"machines__b__decode": 0}, "no machine has decode"),
        ({"machines__a__frontends": 0}, "no machine has frontends"),
        ({"machines__a__master": None}, "one machine must have master = true; none has it"),
        ({"machines__b__master": True}, "a and b have it"),
        ({"machines__b__master": "yes"}, "master must be true or false"),
        ({"machines__b__host": "10.0.0.1"}, "two machines have the host 10.0.0.1"),
        ({"cluster__secret_file": None}, "secret_file is missing"),
        ({"cluster__master_port": 7800}, "two different ports"),
        ({"cluster__ttft_slo_s": -1.0}, "ttft_slo_s must be above 0"),
        ({"machines": {}}, "one machine must have master"),
        ({"machines": 3}, r"\[machines\] must be a table"),
        ({"machines__b": 3}, r"\[machines.b\]: must be a table"),
        ({"machines__b/c": {"host": "10.0.0.3"}}, "letters, digits"),
    ],
)
def test_mistakes(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_cluster(given(**changes))


def test_an_unknown_machine() -> None:
    with pytest.raises(ConfigError, match=r"no machine 'aa'; did you mean 'a'\?"):
        parse_cluster(given()).machine("aa")


def test_the_file_is_named_in_every_error(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    with pytest.raises(ConfigError, match=r"cannot read .*cluster.toml: No such file"):
        read_cluster(file)
    file.write_text("[cluster")
    with pytest.raises(ConfigError, match=r"cluster.toml is not TOML"):
        read_cluster(file)
    file.write_text(TEXT.replace("decode = 1", "decode = 0"))
    with pytest.raises(ConfigError, match=r"cluster.toml: no machine has decode"):
        read_cluster(file)
    file.write_text(TEXT)
    assert list(read_cluster(file).machines) == ["a", "b"]
