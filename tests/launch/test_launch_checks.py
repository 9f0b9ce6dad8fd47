"""What is refused before anything starts."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moonpool.base.errors import ConfigError, ModelError, NoSpace
from moonpool.base.limits import require_disk
from moonpool.base.units import format_nbytes
from moonpool.engine.model_files import resolve
from moonpool.launch.checks import available_nbytes, choose_port, require_memory, require_whole_model
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node

GIB = 1024**3
LLAMA = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 10, "eos_token_id": 1,
"rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": true}"""


def test_a_taken_port_is_refused_and_a_free_one_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            choose_port("127.0.0.1", port)
    assert choose_port("127.0.0.1", port) == port
    assert choose_port("127.0.0.1", 0) > 0


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        choose_port("192.0.2.1", 8000)


def test_more_memory_than_there_is_is_refused() -> None:
    require_memory(1, 1)
    with pytest.raises(NoSpace, match="--dram"):
        require_memory(100 * 1000**4, 1)


def test_a_disk_that_is_too_small_is_refused_with_what_it_has(tmp_path: Path) -> None:
    info = os.statvfs(tmp_path)
    total = info.f_blocks * info.f_frsize
    require_disk(tmp_path / "not" / "there", total)
    with pytest.raises(ConfigError) as caught:
        require_disk(tmp_path / "not" / "there", total // 2 + 1, 2)
    wanted = (
        f"--ssd-size is {format_nbytes(total // 2 + 1)} for each of 2 nodes, and the disk of {tmp_path}/not/there has"
    )
    assert str(caught.value).startswith(f"{wanted} {format_nbytes(total)} in all, ")
    assert str(caught.value).endswith(" free; choose a smaller --ssd-size, or a folder on another disk (--ssd)")


async def test_a_node_whose_log_is_larger_than_the_disk_does_not_start(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-") as run_dir:
        config = NodeConfig(
            name="n",
            master_address="unix:/nowhere",
            dram_nbytes=1 << 20,
            run_dir=run_dir,
            ssd_dir=str(tmp_path / "ssd"),
            ssd_nbytes=10**18,
            tcp_host=None,
        )
        with pytest.raises(ConfigError, match="--ssd-size is 1000000 TB, and the disk of"):
            await Node(config).start()
    assert not (tmp_path / "ssd").exists()


def fake_machine(root: Path, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, cgroups


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    proc, cgroups = fake_machine(tmp_path, "0::/user\n3:cpu:/x\n")
    (cgroups / "user").mkdir(parents=True)
    (cgroups / "user" / "memory.max").write_text("max\n")
    (cgroups / "user" / "memory.current").write_text("5\n")
    assert available_nbytes(proc, cgroups) == 8 * GIB


def test_the_tightest_control_group_decides(tmp_path: Path) -> None:
    proc, cgroups = fake_machine(tmp_path, "0::/outer/inner\n")
    for folder, limit in (("outer", 2 * GIB), ("outer/inner", 4 * GIB)):
        (cgroups / folder).mkdir(parents=True)
        (cgroups / folder / "memory.max").write_text(f"{limit}\n")
        (cgroups / folder / "memory.current").write_text(f"{GIB}\n")
        (cgroups / folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 2}\n")
    assert available_nbytes(proc, cgroups) == 2 * GIB - GIB + GIB // 2


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    proc, cgroups = fake_machine(tmp_path, "4:memory:/job\n")
    folder = cgroups / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{3 * GIB}")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}")
    assert available_nbytes(proc, cgroups) == 2 * GIB


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA)
    weights = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(1000, dtype=np.float32)}, weights)
    require_whole_model(resolve(str(tmp_path)))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated"):
        require_whole_model(resolve(str(tmp_path)))


def test_a_gguf_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        require_whole_model(resolve(str(path)))
