"""`moonpool serve` where it cannot work: one clear line, exit code 1, nothing started, nothing left."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_cli import Command, forked_cli
from waiting import HANG_S

from moonpool.base.errors import ConfigError
from moonpool.base.units import format_nbytes


@pytest.fixture
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mp-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def serve() -> Iterator[Command]:
    with forked_cli("serve") as moonpool:
        yield partial(moonpool, "serve")


def refusal(serve: Command, runtime: Path, *arguments: str) -> str:
    """The one line that `moonpool serve` ends with."""
    ran = serve("--state-dir", runtime / "state", *arguments, XDG_RUNTIME_DIR=str(runtime))
    return line_of(ran, runtime)


def line_of(ran: subprocess.CompletedProcess[str], runtime: Path) -> str:
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout == ""
    assert [path.name for path in runtime.iterdir() if path.name.startswith("moonpool-")] == []
    (line,) = ran.stderr.splitlines()
    assert line.startswith("moonpool serve: ")
    return line


def limit_address_space(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def tiny_model(folder: Path, missing_nbytes: int) -> str:
    """A GGUF file with one tensor of 1,024 floats, cut short by `missing_nbytes`."""
    import numpy as np
    from gguf import GGUFWriter

    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size - missing_nbytes])
    return str(path)


def test_a_taken_port(serve: Command, runtime: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is taken" in refusal(serve, runtime, "--port", str(port))


def test_a_pool_larger_than_the_machine(serve: Command, runtime: Path) -> None:
    assert "not enough memory" in refusal(serve, runtime, "--port", "0", "--dram", "100TB")


def test_a_log_larger_than_the_disk(serve: Command, runtime: Path) -> None:
    line = refusal(
        serve, runtime, "--port", "0", "--nodes", "2", "--ssd", str(runtime / "ssd"), "--ssd-size", "900000TB"
    )
    assert f"--ssd-size is 900000 TB for each of 2 nodes, and the disk of {runtime}/ssd has " in line
    assert line.endswith(" free; choose a smaller --ssd-size, or a folder on another disk (--ssd)")


def test_a_truncated_model(serve: Command, runtime: Path) -> None:
    line = refusal(serve, runtime, "--port", "0", "--model", tiny_model(runtime, missing_nbytes=1000))
    assert "tiny.gguf is truncated" in line


def test_an_unknown_model(serve: Command, runtime: Path) -> None:
    assert "neither a known model" in refusal(serve, runtime, "--port", "0", "--model", "no-such-model")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dram", "lots"), "not a size"),
        (("--prefill", "0"), "at least one prefill"),
        (("--port", "99999"), "is not a port"),
        (("--tenants-file", "/nowhere.json"), "tenants file"),
        (("--secret-file", "/nowhere"), "cannot read /nowhere"),
        (("--log-level", "LOUD"), "LOUD"),
        (("--dtype", "int8"), "--dtype cannot be 'int8'; choose one of: float32, bfloat16, float16"),
    ],
)
def test_wrong_settings(serve: Command, runtime: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refusal(serve, runtime, "--port", "0", *arguments)


@pytest.mark.parametrize("nbytes", [100_000_000, 1_000_000_000])
def test_too_little_address_space(runtime: Path, nbytes: int) -> None:
    ran = subprocess.run(  # Python itself starts under the limit
        [sys.executable, "-m", "moonpool", "serve", "--state-dir", str(runtime / "state"), "--port", "0"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=HANG_S / 2,  # a service that had started would go on
        preexec_fn=partial(limit_address_space, nbytes),
    )
    line = line_of(ran, runtime)
    assert f"`ulimit -v` allows {format_nbytes(nbytes)} of address space" in line
    assert "raise it" in line


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_cuda_without_a_gpu(serve: Command, runtime: Path) -> None:
    line = refusal(serve, runtime, "--port", "0", "--device", "cuda")
    assert "--device cuda cannot be used" in line
    assert "--device cpu always works" in line


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_a_worker_without_its_gpu() -> None:
    from moonpool.worker.build import build
    from moonpool.worker.config import WorkerConfig

    addresses: dict[str, Any] = {
        "address": "unix:/w",
        "conductor_address": "unix:/c",
        "master_address": "unix:/m",
        "run_dir": "/r",
    }
    with pytest.raises(ConfigError, match=r"--device cuda cannot be used: torch .*--device cpu always works"):
        build(WorkerConfig(name="w", role="prefill", model="none", device="cuda", **addresses), incarnation=1)
