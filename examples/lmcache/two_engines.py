"""Two vLLM engines with LMCache, one after the other: the second one loads the prompt that the first one computed.

    python examples/lmcache/two_engines.py MODEL [OPTIONS]

OPTIONS is JSON for vLLM's LLM class, for example '{"dtype": "float32", "enforce_eager": true}' on a CPU. Run it with
the Python of an environment that has vLLM, LMCache and Moonpool (docs/lmcache.md). Each engine has an LMCache server of
its own that starts empty, so what the second one does not compute came through the pool.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

NUM_PROMPT_TOKENS = 900


def main(model: str, options: str) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))
        master = f"unix:{folder}/master.sock"
        stack.enter_context(role("master", "--listen", master, "--data-dir", f"{folder}/data"))
        stack.enter_context(
            role("node", "--name", "here", "--master", master, "--dram", "1GB", "--run-dir", f"{folder}/run")
        )
        results = [run_engine(model, options, master, Path(folder, name)) for name in ("first", "second")]
    for name, result in zip(("first", "second"), results, strict=True):
        print(f"{name} engine: {result['loaded']} of {NUM_PROMPT_TOKENS} tokens loaded, {result['seconds']:.2f} s")
    print("the answers are equal" if results[0]["tokens"] == results[1]["tokens"] else "THE ANSWERS DIFFER")


def run_engine(model: str, options: str, master: str, folder: Path) -> dict[str, Any]:
    """Start an LMCache server and an engine, compute the prompt, end both. Return what the engine reported."""
    folder.mkdir()
    port, counters = free_port(), folder / "counters.json"
    with running(lmcache_command(port, master, counters), folder / "lmcache.log"):
        command = [sys.executable, __file__, model, options, str(port)]
        engine = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result: dict[str, Any] = json.loads(engine.stdout.splitlines()[-1])
        if not result["loaded"]:
            wait_stored(counters)
    return result


def lmcache_command(port: int, master: str, counters: Path) -> list[str]:
    plugin = {
        "type": "native_plugin",
        "module_path": "moonpool.integrations.lmcache",
        "class_name": "LmcacheConnector",
        "adapter_params": {"master": master, "counters_file": str(counters)},
    }
    return [
        *(sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "localhost", "--port", str(port)),
        *("--l1-size-gb", "0.5", "--eviction-policy", "LRU", "--chunk-size", "128"),
        *("--supported-transfer-mode", "engine_driven"),  # for an engine on a CPU; leave it out on a GPU
        *("--l2-adapter", json.dumps(plugin)),
    ]


def engine_main(model: str, options: str, port: int) -> None:
    """The engine's process. The last line that it prints is its result."""
    from vllm import LLM, SamplingParams

    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # vLLM's default, "fail", fails requests whose KV cannot be loaded
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
    }
    llm = LLM(model, disable_log_stats=False, kv_transfer_config=connector, **json.loads(options))
    rng = random.Random(1)
    prompt = [rng.randrange(3, 500) for _ in range(NUM_PROMPT_TOKENS)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    began_s = time.monotonic()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    seconds = time.monotonic() - began_s
    loaded = sum(int(each.value) for each in llm.get_metrics() if each.name == "vllm:external_prefix_cache_hits")
    result = {"tokens": list(output.outputs[0].token_ids), "loaded": loaded, "seconds": seconds}
    print(json.dumps(result), flush=True)


def wait_stored(counters: Path) -> None:
    """LMCache stores in the background; its plug-in writes what it has stored into a file."""
    deadline_s = time.monotonic() + 60
    while not (counters.exists() and json.loads(counters.read_text())["stored"] >= NUM_PROMPT_TOKENS // 128):
        if time.monotonic() > deadline_s:
            raise SystemExit("LMCache stored nothing; see its log")
        time.sleep(0.1)


@contextmanager
def role(name: str, *options: str) -> Iterator[None]:
    """`moonpool master` or `moonpool node` as its own process; ready when this yields."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "moonpool", name, *options, "--log-level", "warning", "--ready-fd", str(write_fd)]
    process = subprocess.Popen(command, pass_fds=(write_fd,))
    os.close(write_fd)
    try:
        with open(read_fd) as ready:
            ready.readline()
        yield
    finally:
        process.terminate()
        process.wait(timeout=10)


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


if __name__ == "__main__":
    if len(sys.argv) == 4:
        engine_main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "{}")
