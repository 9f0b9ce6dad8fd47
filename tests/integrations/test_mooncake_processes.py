"""`moonpool mooncake master` and `client` as processes: a store uses them, and they end in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from waiting import HANG_S, wait_until

from moonpool.integrations.mooncake import MooncakeDistributedStore
from moonpool.integrations.mooncake.segment_names import reserve_port

ROOT = Path(__file__).resolve().parents[2]


def start(stack: ExitStack, folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start the command and return it with its log up to the line that says that it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moonpool", "mooncake", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)  # waits for it and closes its pipe
    stack.callback(process.kill)  # before that
    assert process.stderr is not None
    log = ""
    while " serves" not in log:
        line = process.stderr.readline()
        assert line, log
        log += line
    return process, log


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, rest


def test_a_store_on_a_master_and_a_client() -> None:
    # Not pytest's folder: the path of a Unix socket in it would be too long.
    with tempfile.TemporaryDirectory(prefix="mp-test-") as name, ExitStack() as stack:
        folder = Path(name)
        master, log = start(stack, folder, "master", "--rpc_port=0", "--metrics_port=0", "--max_threads=4")
        assert "--max_threads has no effect" in log
        found = re.search(r"serves at tcp:(\S+)", log)
        assert found is not None
        with reserve_port() as reserved:
            port = reserved.getsockname()[1]
        size, address = "--global_segment_size=64MB", f"--master_server_address={found[1]}"
        client, _ = start(stack, folder, "client", f"--port={port}", size, address)
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", found[1]) == 0
        assert store.put("k", b"v" * 1000) == 0
        assert store.get("k") == b"v" * 1000
        (replica,) = store.get_replica_desc("k")
        assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == f"127.0.0.1:{port}"
        stop(client)
        wait_until(lambda: store.is_exist("k") == 0, "the client took its object along")
        store.close()
        stop(master)
        assert list(folder.iterdir()) == []
