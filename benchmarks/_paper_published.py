"""What Mooncake's authors published: FAST'25 (text and the vector graphics of its figures) and arXiv 2407.00079.

Shares are between 0 and 1, times in seconds. By workload where it matters; "moonpool" stands where they say Mooncake.
"""

from __future__ import annotations

WORKLOADS = ("conversation", "tool-agent", "synthetic")

# Table 2: mean input, mean output, cache ratio, requests.
TABLE_2 = {
    "conversation": (12035, 343, 0.40, 12031),
    "tool-agent": (8596, 182, 0.59, 23608),
    "synthetic": (15325, 149, 0.66, 3993),
}

# Figs 1, 6 and 7: share of requests whose TBT is within 100, 200 and 300 ms, 16 nodes.
TBT_TARGETS_S = (0.1, 0.2, 0.3)
EFFECTIVE_TTFT_S = 30.0
TBT_SHARES = {
    "conversation": {
        "moonpool": (0.966, 1.0, 1.0),
        "vllm": (0.161, 0.388, 0.628),
        "vllm-prefix": (0.151, 0.343, 0.560),
        "vllm-chunked": (0.094, 0.288, 0.553),
    },
    "tool-agent": {
        "moonpool": (0.932, 0.998, 1.0),
        "vllm": (0.431, 0.453, 0.498),
        "vllm-prefix": (0.565, 0.700, 0.813),
        "vllm-chunked": (0.186, 0.213, 0.404),
    },
    "synthetic": {
        "moonpool": (0.996, 1.0, 1.0),
        "vllm": (0.613, 0.710, 0.781),
        "vllm-prefix": (0.610, 0.708, 0.772),
        "vllm-chunked": (0.466, 0.573, 0.695),
    },
}
TBT_GAINS = {  # as printed: Mooncake over the best of the three, less one
    "conversation": (4.98, 1.57, 0.59),
    "tool-agent": (0.64, 0.42, 0.22),
    "synthetic": (0.62, 0.40, 0.28),
}
BEST_BASELINE = {"conversation": "vllm", "tool-agent": "vllm-prefix", "synthetic": "vllm"}
TBT_PERCENTILES = (50, 90, 99)
TBT_S = {
    ("conversation", "moonpool"): (0.074, 0.092, 0.113),
    ("tool-agent", "moonpool"): (0.070, 0.094, 0.155),
    ("synthetic", "moonpool"): (0.040, 0.054, 0.080),
    ("conversation", "vllm"): (0.244, 0.564, 1.302),
}

# Fig 5: TTFT, conversation trace, 16 nodes: mean, quartiles, upper whisker (None: off the scale).
TTFT_S = {
    "paper": (3.07, 0.39, 1.72, 4.14, 9.8),
    "local": (3.58, 0.56, 2.16, 5.14, 12.0),
    "least-loaded": (5.27, 1.05, 3.56, 7.41, 16.9),
    "random": (19.65, 3.5, 13.7, 29.3, None),
}
# The same in arXiv: means on 8 + 8 nodes, trace of 23,608 requests.
ARXIV_TTFT_S = {"paper": 6.26, "local": 14.36, "least-loaded": 60.41, "random": 92.07}

# Fig 8: mean GPU seconds of prefill per request.
PREFILL_GPU_S = {
    "conversation": {"moonpool": 1.062, "vllm": 1.661, "vllm-prefix": 1.523, "vllm-chunked": 2.021},
    "tool-agent": {"moonpool": 0.527, "vllm": 1.117, "vllm-prefix": 0.740, "vllm-chunked": 1.415},
    "synthetic": {"moonpool": 0.733, "vllm": 2.022, "vllm-prefix": 1.896, "vllm-chunked": 2.436},
}

# Fig 9: hit rate of one cache by its size in tokens; and at 3M tokens as a share of the highest.
HIT_RATE_TOKENS = (10_000, 100_000, 1_000_000, 2_000_000, 4_000_000, 5_000_000, 8_000_000, 10_000_000, 50_000_000,
                   100_000_000)  # fmt: skip
HIT_RATES = {
    "conversation": (0.045, 0.073, 0.087, 0.120, 0.215, 0.247, 0.300, 0.326, 0.398, 0.401),
    "tool-agent": (0.173, 0.363, 0.386, 0.414, 0.484, 0.505, 0.544, 0.561, 0.595, 0.595),
    "synthetic": (0.0, 0.012, 0.146, 0.235, 0.380, 0.435, 0.545, 0.589, 0.658, 0.658),
    "all": (0.095, 0.186, 0.227, 0.242, 0.274, 0.296, 0.352, 0.381, 0.530, 0.535),
}
SHARE_OF_MOST_AT_3M = {"conversation": 0.41, "tool-agent": 0.75, "synthetic": 0.46, "all": 0.48}

# Fig 10: 10 prefill nodes of 3M tokens each, answers of one token: (hit rate, GPU seconds), local and global.
LOCAL_AND_GLOBAL = {
    "conversation": ((0.169, 1.38), (0.375, 1.05)),
    "tool-agent": ((0.420, 0.70), (0.581, 0.52)),
    "synthetic": ((0.264, 1.50), (0.622, 0.78)),
}

# Fig 11: replicas of the 10th, 100th, ... most used block: the most, and at the end (None: not legible).
REPLICA_RANKS = (10, 100, 1000, 10_000)
REPLICAS = {
    "conversation": ((8, 7, 6, 3), (8, 7, 1, 0)),
    "tool-agent": ((8, 7, 5, 3), (8, 7, 3, 0)),
    "synthetic": ((5, 4, 5, 2), (5, 4, None, None)),
}

# Fig 12: seconds for 40 GB (100 GB for the first also: 1.10 s), by network and way.
TRANSFER_40_GB_S = {
    (4, 200): {"transfer engine": 0.451, "tcp": 1.081, "gloo": 3.38},
    (8, 400): {"transfer engine": 0.211, "tcp": 0.966, "gloo": 3.42},
}
TRANSFER_100_GB_S = 1.10

# Fig 13: synthetic trace; by bandwidth in Gbit/s, and without any reuse.
TTFT_BY_GBPS = {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}
THEORETICAL_BY_GBPS = {24: 1.54, 40: 0.935, 80: 0.478, 100: 0.382, 160: 0.241, 320: 0.123, 400: 0.099}
REAL_BY_GBPS = {24: 3.65, 40: 1.13, 80: 0.51, 100: 0.403, 160: 0.251, 320: 0.126, 400: 0.102}
RECOMPUTE_TTFT_S = 2.62
BREAK_EVEN_GBPS = 39.0  # between 38 and 40

# Fig 14 (its prefill and decode times are in moonpool/sim/physics/paper_fit.py), by tokens of the prompt.
TRANSFER_S = {8192: 0.034, 16384: 0.063, 32768: 0.126, 65536: 0.251, 131072: 0.498}
LOAD_S = {8192: 0.029, 16384: 0.053, 32768: 0.106, 65536: 0.213, 131072: 0.420}
SCHEDULE_S = 0.04
PREFILL_SAVED_AT_128K, TTFT_SAVED_AT_128K = 0.92, 0.86

# Fig 15: synthetic trace, 16 nodes, targets 10 s and 100 ms, by the number of prefill nodes.
SPLIT_TARGETS = (10.0, 0.1)
SPLITS = (5, 6, 7, 8, 9, 10, 11)
SPLIT_SHARES = (0.777, 0.972, 0.991, 0.990, 0.992, 0.984, 0.861)
SPLIT_TTFT_S = (5.74, 1.71, 1.30, 1.19, 1.12, 1.11, 1.14)
SPLIT_TBT_S = (0.0315, 0.0318, 0.0329, 0.0350, 0.0382, 0.0442, 0.0583)

# Equation 2 at 8k tokens: GB per second above which fetching KV beats computing it.
BREAK_EVEN_GB_S = {"a800": 6.0, "h800": 19.0}

# arXiv, end to end: more requests than coupled vLLM on as many nodes, where 90 % have a TTFT within 10 times and a TBT
# within 5 times what they are without load.
ARXIV_TTFT_TIMES, ARXIV_TBT_TIMES = 10.0, 5.0
ARXIV_GAINS = {"arxiv-summarization": 0.20, "l-eval": 0.40}  # 3 + 1 nodes against 4
ARXIV_SIMULATED_GAINS = (0.50, 5.25)  # the least and the most over prompts of 16k to 128k tokens
REAL_TBT_SHARES = {"moonpool": 1.0, "vllm": 0.57}  # 10 + 10 nodes against 20, within 0.1 s
REAL_GAIN = 0.75
PRODUCTION_GAINS = {"a800": 1.15, "h800": 1.07}  # over the vLLM-based system before, as requests served
# arXiv, trace of 23,608 requests: hit rate of LRU, LFU and by length by its size in blocks of 512 tokens (None: any).
BLOCK_CAPACITIES = (None, 100_000, 50_000, 30_000, 10_000, 1_000)
BLOCK_HIT_RATES = {
    "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "by length": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}
NEVER_REUSED = 0.5  # "more than half of the blocks"
# arXiv: seconds that storing adds to a prefill of 8k and of 128k tokens, layer by layer and after it.
STORE_LAYER_WISE_S, STORE_AFTER_S = {8192: 0.1, 131072: 0.1}, {8192: 0.11, 131072: 0.87}
# 8 + 8 nodes, 23,000 requests at twice the speed; "predicted" is our own form of the paper's
REJECTED = {"none": 4183, "early": 3771, "paper": 3589, "predicted": 3589}
