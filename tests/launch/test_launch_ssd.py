"""`moonpool serve --ssd DIR`: the node gets the folder, and sizes that make no log are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moonpool.base.config import from_mapping
from moonpool.base.errors import ConfigError
from moonpool.launch.machine import NODE
from moonpool.launch.plan import ServeConfig, plan_machine, plan_roles
from moonpool.node.config import NodeConfig


def node_config(name: str = NODE, **settings: Any) -> NodeConfig:
    config = ServeConfig(**settings)
    planned = plan_roles(config, plan_machine(config, num_cores=2), Path("/run/mp"), Path("/state"))
    roles = {role.name: role for role in planned}
    options = {key: value for key, value in roles[name].options.items() if key != "log_level"}
    return from_mapping(NodeConfig, options)


def test_without_a_folder_there_is_no_disk() -> None:
    config = node_config()
    assert (config.ssd_dir, config.ssd_nbytes) == (None, 0)


@pytest.mark.parametrize("size", ["64MiB", "100MB", "1GB", "10GB", "4TB"])
def test_every_size_makes_a_log(size: str) -> None:
    ServeConfig(ssd="/mnt/ssd", ssd_size=size).check()
    config = node_config(ssd="/mnt/ssd", ssd_size=size)
    assert config.ssd_dir == "/mnt/ssd"
    log = config.ssd_log()
    assert log.max_nbytes == config.ssd_nbytes
    assert 4 * 1024**2 <= log.file_nbytes <= 256 * 1024**2


def test_too_small_a_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssd-size"):
        ServeConfig(ssd="/mnt/ssd", ssd_size="10MB").check()
