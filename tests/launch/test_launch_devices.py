"""Which worker computes where, and how the workers of a GPU share its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import ConfigError, NoSpace
from moonpool.engine.config import ModelConfig
from moonpool.launch.plan import ServeConfig, plan_kv, plan_machine, plan_roles
from moonpool.worker.config import HOST_KV_NBYTES

GB = 1_000_000_000
SMALL = ModelConfig(
    architecture="llama", vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_layers=8, num_heads=8,
    num_kv_heads=8, head_dim=128, max_position=4096, rms_norm_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip


def worker_options(config: ServeConfig, gpu_kv_nbytes: dict[str, int]) -> list[tuple[Any, Any]]:
    machine = plan_machine(config, num_cores=4, gpu_kv_nbytes=gpu_kv_nbytes)
    roles = plan_roles(config, machine, Path("/run"), Path("/state"))
    return [(role.options["device"], role.options["kv_nbytes"]) for role in roles if role.command == "worker"]


@pytest.mark.parametrize(
    ("device", "devices"),
    [
        ("cpu", ("cpu",) * 4),
        ("cuda", ("cuda:0",) * 4),
        ("cuda:1", ("cuda:1",) * 4),
        ("cuda:0, cuda:1", ("cuda:0", "cuda:1", "cuda:0", "cuda:1")),
        ("cuda:0,cuda:1,cuda:2,cpu", ("cuda:0", "cuda:1", "cuda:2", "cpu")),
    ],
)
def test_devices_are_given_out_in_turn(device: str, devices: tuple[str, ...]) -> None:
    config = ServeConfig(prefill=2, decode=2, device=device)
    config.check()
    assert config.devices == devices


@pytest.mark.parametrize(
    ("device", "dtype", "found"),
    [
        ("cpu", None, "float32"),
        ("cuda", None, "bfloat16"),
        ("cuda:0,cpu", None, "bfloat16"),
        ("cuda", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_all_workers_compute_in_one_type(device: str, dtype: Any, found: str) -> None:
    config = ServeConfig(device=device, dtype=dtype)
    machine = plan_machine(config, num_cores=4, gpu_kv_nbytes={"cuda:0": GB})
    roles = plan_roles(config, machine, Path("/run"), Path("/state"))
    assert [role.options["dtype"] for role in roles if role.command == "worker"] == [found, found]


@pytest.mark.parametrize("device", ["gpu", "cuda:0,", "cuda:0,cuda:1,cuda:2"])
def test_unknown_and_too_many_devices(device: str) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(device=device).check()


def test_each_gpu_is_shared_by_its_own_workers() -> None:
    config = ServeConfig(prefill=2, decode=1, device="cuda:0,cuda:1", dtype="bfloat16")
    planned = plan_kv(config, SMALL, {"cuda:0": 80 * GB, "cuda:1": 80 * GB})
    assert planned["cuda:0"] < 40 * GB < planned["cuda:1"] < 80 * GB  # two workers on cuda:0
    options = worker_options(config, planned)
    assert options == [(device, planned[device]) for device in ("cuda:0", "cuda:1", "cuda:0")]


def test_the_cpu_has_its_own_default() -> None:
    config = ServeConfig(device="cuda:0,cpu")
    planned = plan_kv(config, SMALL, {"cuda:0": 80 * GB})
    assert worker_options(config, planned) == [("cuda:0", planned["cuda:0"]), ("cpu", HOST_KV_NBYTES)]
    assert plan_kv(ServeConfig(), SMALL, {}) == {}


def test_configured_pages_must_fit() -> None:
    config = ServeConfig(device="cuda", kv="20GB")
    assert plan_kv(config, SMALL, {"cuda:0": 80 * GB}) == {"cuda:0": 20 * GB}
    with pytest.raises(NoSpace, match=r"cuda:0.*each of 2 workers"):
        plan_kv(replace(config, kv="50GB"), SMALL, {"cuda:0": 80 * GB})
