"""Two vLLM servers share one pool: the second one loads the prompt that the first one computed.

    python examples/vllm/shared_store.py MODEL [options of vllm serve]

Run it with the Python of an environment that has vLLM and Moonpool (docs/vllm.md). On a CPU without bf16 instructions
add `--dtype float32 --enforce-eager`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from serving import free_port, metric, random_prompt, report, running, vllm_server

CONNECTOR = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",  # vLLM's default, "fail", fails requests whose KV cannot be loaded
}


def start_pool(stack: ExitStack, folder: Path, admin_port: int) -> dict[str, str]:
    """A master, and 1 GB of memory. Return the environment variable that tells vLLM about them."""
    address = f"127.0.0.1:{(port := free_port())}"
    roles = {
        "master": [f"--rpc_port={port}", f"--metrics_port={admin_port}"],
        "client": [f"--master_server_address={address}", f"--port={free_port()}", "--global_segment_size=1GB"],
    }
    for role, flags in roles.items():
        command = [sys.executable, "-m", "moonpool", "mooncake", role, *flags]
        stack.enter_context(running(command, {}, folder / f"{role}.log"))
    settings = {
        "mode": "standalone-store",  # vLLM offers no memory of its own
        "master_server_address": address,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_buffer_size": "1MB",
    }
    file = folder / "mooncake.json"
    file.write_text(json.dumps(settings))
    return {"MOONCAKE_CONFIG_PATH": str(file)}


def wait_until_stored(admin_port: int) -> None:
    """vLLM stores in the background: wait until the number of objects no longer grows."""
    counts = [0.0, 0.0]
    while not counts[-1] or counts[-1] != counts[-2]:
        time.sleep(0.5)
        counts.append(metric(f"http://127.0.0.1:{admin_port}/metrics", "master_key_count"))


def main(model: str, options: list[str]) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        env = start_pool(stack, folder, admin_port := free_port())
        servers = [
            stack.enter_context(vllm_server(folder / f"{name}.log", model, CONNECTOR, env, options))
            for name in ("first", "second")
        ]
        for server in servers:
            server.wait_ready()
        prompt = random_prompt()
        computed = servers[0].complete(prompt, 16)
        report("first server", computed)
        wait_until_stored(admin_port)
        loaded = servers[1].complete(prompt, 16)
        report("second server", loaded)
        print("the answers are equal" if computed.text == loaded.text else "THE ANSWERS DIFFER")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
