"""Two SGLang engines, one after the other: the second one loads the prompt that the first one computed.

    python examples/sglang/two_engines.py MODEL [OPTIONS]

OPTIONS is JSON for sglang.Engine, for example '{"tp_size": 2}'. Run it with the Python of an environment that has
SGLang and Moonpool (docs/sglang.md). SGLang's own `mooncake` backend finds Moonpool as `mooncake`. The first engine has
ended before the second one starts, so what the second one does not compute came from the pool.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from moonpool.integrations.mooncake import shadow_path

NUM_PROMPT_TOKENS = 900


def main(model: str, options: str) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))
        master = f"unix:{folder}/master.sock"
        stack.enter_context(role("master", "--listen", master, "--data-dir", f"{folder}/data"))
        stack.enter_context(
            role("node", "--name", "here", "--master", master, "--dram", "1GB", "--run-dir", f"{folder}/run")
        )
        results = [run_engine(model, options, master) for _ in range(2)]
    for name, result in zip(("first", "second"), results, strict=True):
        print(f"{name} engine: {result['loaded']} of {NUM_PROMPT_TOKENS} tokens loaded, {result['seconds']:.2f} s")
    print("the answers are equal" if results[0]["tokens"] == results[1]["tokens"] else "THE ANSWERS DIFFER")


def run_engine(model: str, options: str, master: str) -> dict[str, Any]:
    """Run one engine in a process of its own. Return what it reported."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), shadow_path()]))
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "MOONCAKE_MASTER": master,
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",  # the engine offers no memory: its KV outlives it
        "SGLANG_HICACHE_MOONCAKE_REUSE_TE": "0",
    }
    command = [sys.executable, __file__, model, options, "engine"]
    engine = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(engine.stdout.splitlines()[-1])
    return result


def engine_main(model: str, options: str) -> None:
    """The engine's process. The last line that it prints is its result."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        page_size=64,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_mem_layout="page_first_direct",
        hicache_io_backend="direct",
        hicache_write_policy="write_through",
        hicache_storage_backend="mooncake",
        hicache_storage_prefetch_policy="wait_complete",
        **json.loads(options),
    )
    rng = random.Random(1)
    prompt = [rng.randrange(3, 500) for _ in range(NUM_PROMPT_TOKENS)]
    began_s = time.monotonic()
    output = engine.generate(
        input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    )
    seconds = time.monotonic() - began_s
    details = output["meta_info"].get("cached_tokens_details") or {}
    if not details.get("storage"):
        time.sleep(5)  # SGLang stores in the background and does not say when it is done
    engine.shutdown()
    result = {"tokens": output["output_ids"], "loaded": details.get("storage", 0), "seconds": seconds}
    print(json.dumps(result), flush=True)


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


if __name__ == "__main__":
    if len(sys.argv) == 4:
        engine_main(sys.argv[1], sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "{}")
