"""One vLLM engine, driven by lines: a prompt of token ids in as JSON, `RESULT {json}` out; ends when its input does.

Run with the Python of vLLM's own environment: `vllm_driver.py MODEL_FOLDER CONNECTOR_JSON|-`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

_NUM_TOKENS = 16


def say(result: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def make_engine(model: str, connector: str) -> LLM:
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 * 1024 * 1024,
        disable_log_stats=False,
        **({} if connector == "-" else {"kv_transfer_config": json.loads(connector)}),
    )


def external_hits(engine: LLM) -> int:
    """Tokens that came from the connector, by vLLM's own count, since the start."""
    return sum(int(each.value) for each in engine.get_metrics() if each.name == "vllm:external_prefix_cache_hits")


def main() -> None:
    engine = make_engine(sys.argv[1], sys.argv[2])
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False)
    say({"ready": True})
    for line in sys.stdin:
        output = engine.generate([{"prompt_token_ids": json.loads(line)}], params, use_tqdm=False)[0]
        say(
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "external_hits": external_hits(engine),
            }
        )
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
