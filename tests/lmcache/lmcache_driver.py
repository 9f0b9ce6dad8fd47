"""One vLLM engine with LMCache's connector, driven by lines: token ids in as JSON, `RESULT {json}` out.

It ends when its input does. Run with the Python that has vLLM and LMCache: `lmcache_driver.py MODEL_FOLDER PORT`.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams

_NUM_TOKENS = 16


def make_engine(model: str, port: int) -> LLM:
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
    }
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 * 1024 * 1024,
        disable_log_stats=False,
        kv_transfer_config=connector,
    )


def external_hits(engine: LLM) -> int:
    """Return the prompt tokens that came through the connector, by vLLM's own count, since the start."""
    return sum(int(each.value) for each in engine.get_metrics() if each.name == "vllm:external_prefix_cache_hits")


def main() -> None:
    engine = make_engine(sys.argv[1], int(sys.argv[2]))
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False)
    print("READY", flush=True)
    for line in sys.stdin:
        before = external_hits(engine)
        output = engine.generate([{"prompt_token_ids": json.loads(line)}], params, use_tqdm=False)[0]
        result = {"tokens": list(output.outputs[0].token_ids), "cached": external_hits(engine) - before}
        print("RESULT " + json.dumps(result), flush=True)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
