"""What Mooncake's authors published: FAST'25 (text and the vector graphics of its figures) and arXiv 2407.00079."""

from __future__ import annotations

# Figs 1 and 6: % of requests whose TBT is within 100, 200 and 300 ms, conversation trace, 16 nodes.
TBT_TARGETS_S = (0.1, 0.2, 0.3)
TBT_SHARES = {
    "moonpool": (0.966, 1.0, 1.0),
    "vllm": (0.161, 0.388, 0.628),
    "vllm-prefix": (0.151, 0.343, 0.560),
    "vllm-chunked": (0.094, 0.288, 0.553),
}
TBT_GAINS = (4.98, 1.57, 0.59)  # as printed: Mooncake over vLLM, less one
VLLM_TBT_P50_S = 0.244
MOONCAKE_TBT_P50_S = 0.074
# Fig 8: mean GPU seconds of prefill per request, conversation trace.
PREFILL_GPU_S = {"moonpool": 1.062, "vllm": 1.661, "vllm-prefix": 1.523}
# Fig 5: mean TTFT, conversation trace, 16 nodes; relative to the whole Algorithm 1.
TTFT_S = {"global": 3.07, "local": 3.58, "least-loaded": 5.27, "random": 19.65}
# Fig 9: hit rate of one cache by its size in tokens, conversation trace.
HIT_RATES = {
    100_000: 0.073, 1_000_000: 0.087, 2_000_000: 0.120, 4_000_000: 0.215, 5_000_000: 0.247, 8_000_000: 0.300,
    10_000_000: 0.326, 50_000_000: 0.398, 100_000_000: 0.401,
}  # fmt: skip
# Fig 10: 10 prefill nodes of 3M tokens each, answers of one token, conversation trace.
LOCAL_HIT_RATE, GLOBAL_HIT_RATE = 0.169, 0.375
LOCAL_GPU_S, GLOBAL_GPU_S = 1.38, 1.05
# Fig 13: synthetic trace; TTFT by bandwidth in Gbit/s, and without any reuse.
TTFT_BY_GBPS = {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}
RECOMPUTE_TTFT_S = 2.62
BREAK_EVEN_GBPS = 39.0  # between 38 and 40
# Fig 15: synthetic trace, 16 nodes, targets 10 s and 100 ms: effective share by the number of prefill nodes.
SPLIT_SHARES = {5: 0.777, 6: 0.972, 7: 0.991, 8: 0.990, 9: 0.992, 10: 0.984, 11: 0.861}
SPLIT_TARGETS = (10.0, 0.1)
# Section 2, equation 2 at 8k tokens: bytes per second above which fetching KV beats computing it.
BREAK_EVEN_BANDWIDTH = {"a800": 6e9, "h800": 19e9}
EFFECTIVE_TTFT_S = 30.0
