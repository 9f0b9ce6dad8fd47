"""One vLLM server computes the prompt, another one answers: vLLM's MooncakeConnector on Moonpool's transfer engine.

    python examples/vllm/prefill_decode.py MODEL [options of vllm serve]

Run it with the Python of an environment that has vLLM and Moonpool (docs/vllm.md). On a CPU without bf16 instructions
add `--dtype float32 --enforce-eager`. There is no pool: the KV goes from one server's memory to the other's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from serving import free_port, random_prompt, report, vllm_server


def connector(role: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_connector": "MooncakeConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",  # vLLM's default, "fail", fails requests whose KV cannot be loaded
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    if not torch.accelerator.is_available():
        config["kv_connector_module_path"] = "mooncake_on_cpu"
    return config


def main(model: str, options: list[str]) -> None:
    port = free_port()  # at which the first server tells others where its workers are
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        prefill, decode = (
            stack.enter_context(vllm_server(folder / f"{role}.log", model, connector(role), env, options))
            for role in ("kv_producer", "kv_consumer")
        )
        prefill.wait_ready()
        decode.wait_ready()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/query", timeout=30) as reply:
            engine_id = json.load(reply)["0"]["engine_id"]

        # What vLLM's proxy does with each request: the first server computes the prompt and one token, then the second
        # one fetches the KV and computes all tokens.
        prompt, transfer_id = random_prompt(), str(uuid.uuid4())
        computed = prefill.complete(
            prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        )
        answer = decode.complete(
            prompt,
            16,
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "transfer_id": transfer_id,
                "remote_engine_id": engine_id,
                "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
            },
        )
        report("prefill server", computed)
        report("decode server", answer)
        same = prefill.complete(prompt, 16).text == answer.text
        print("the answers are equal" if same else "THE ANSWERS DIFFER")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
