"""MooncakeConfig and the store for asyncio."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from store_pool import LocalPool

from moonpool.integrations.mooncake.mooncake_config import MooncakeConfig, _parse_segment_size
from moonpool.integrations.mooncake.store import MooncakeDistributedStoreAsync

REQUIRED = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:1"}


def write(path: Path, **settings: object) -> str:
    path.write_text(json.dumps(REQUIRED | settings))
    return str(path)


def test_reads_a_file(tmp_path: Path) -> None:
    config = MooncakeConfig.from_file(write(tmp_path / "c.json", global_segment_size="1.5 GB", enable_ssd_offload="no"))
    assert (config.global_segment_size, config.local_buffer_size) == (3 * 2**29, 2**30)
    assert (config.protocol, config.device_name, config.tenant_id) == ("tcp", "", "default")
    assert config.enable_ssd_offload is False


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": " "},
        {"global_segment_size": -1},
        {"local_hostname": " "},
        {"enable_ssd_offload": "maybe"},
        {"local_buffer_size": "gb"},
        {"client_http_port": "a"},
    ],
)
def test_refuses_wrong_settings(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        MooncakeConfig.from_file(write(tmp_path / "c.json", **change))


def test_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "m:2")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "16mb")
    config = MooncakeConfig.load_from_env()
    assert (config.master_server_address, config.local_hostname) == ("m:2", "localhost")
    assert config.global_segment_size == 16 * 2**20
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", write(tmp_path / "c.json"))
    assert MooncakeConfig.load_from_env().master_server_address == "m:1", "the file counts more"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1024", 1024), ("4096B", 4096), (" 3 gb ", 3 * 2**30), ("1e3", 1000), ("1.5k", 1536), (7, 7)]
)
def test_sizes_are_binary(text: object, nbytes: int) -> None:
    assert _parse_segment_size(text) == nbytes


def test_calls_run_beside_each_other_for_asyncio(pool: LocalPool) -> None:
    async def run(store: MooncakeDistributedStoreAsync) -> None:
        assert await store.async_setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", pool.address) == 0
        assert await asyncio.gather(*[store.async_put(f"k{n}", b"v%d" % n) for n in range(20)]) == [0] * 20
        assert await store.async_get_batch(["k3", "k19"]) == [b"v3", b"v19"]
        assert await store.async_close() == 0

    store = MooncakeDistributedStoreAsync()
    try:
        asyncio.run(run(store))
    finally:
        store.close()
    with pytest.raises(AttributeError):
        _ = store.async_no_such_call
    with pytest.raises(AttributeError):
        _ = store.no_such_call
