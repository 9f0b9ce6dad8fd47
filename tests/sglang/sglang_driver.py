"""One SGLang engine with its hierarchical cache on Mooncake's store, driven by lines: token ids in as JSON, `RESULT
{json}` out. It ends when its input does. Run with the Python that has SGLang: `sglang_driver.py MODEL_FOLDER [EXTRA]`,
where EXTRA is the JSON for hicache_storage_backend_extra_config; without it there is no storage.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_NUM_TOKENS = 16
PAGE_TOKENS = 64
CPU_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 16384,
    "max_running_requests": 4,
    "context_length": 2048,
    "mem_fraction_static": 0.5,
}


def make_engine(model: str, extra: str | None) -> Any:
    import sglang

    storage = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "mooncake",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": extra,
    }
    options = CPU_OPTIONS if extra is None else CPU_OPTIONS | storage
    return sglang.Engine(model_path=model, page_size=PAGE_TOKENS, **options)


def main() -> None:
    engine = make_engine(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    params = {"temperature": 0, "max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
    print("READY", flush=True)
    for line in sys.stdin:
        output = engine.generate(input_ids=json.loads(line), sampling_params=params)
        details = output["meta_info"].get("cached_tokens_details") or {}
        result = {"tokens": output["output_ids"], "cached": int(details.get("storage", 0))}
        print("RESULT " + json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
