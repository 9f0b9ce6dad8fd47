"""The paper's machine: LLaMA3-70B on 8 x A800, by what FAST'25 measured (shared/facts/paper.md D).

Prefill: the fit to all ten points of Fig 14 (within 4.3 %). Decode: the line through Fig 14's decode times, which are
of one sequence. Batches are not published; assumed: KV of all sequences adds up, and each further token of a step
costs what a token of a prompt costs.
"""

from __future__ import annotations

from moonpool.sim.physics.cost import DecodeCost, EngineCost, PrefillCost

_K = 1024
_PER_TOKEN_S = 0.1123 / _K

# Fig 14: tokens of the prompt -> seconds. The cached share of the second is 95 %, in whole blocks of 256 tokens.
MEASURED_PREFILL_S = {8 * _K: 1.00, 16 * _K: 2.05, 32 * _K: 4.48, 64 * _K: 10.59, 128 * _K: 27.51}
MEASURED_CACHED_PREFILL_S = {8 * _K: 0.135, 16 * _K: 0.227, 32 * _K: 0.406, 64 * _K: 0.882, 128 * _K: 2.328}
MEASURED_DECODE_S = {8 * _K: 3.39, 16 * _K: 3.44, 32 * _K: 3.52, 64 * _K: 3.66, 128 * _K: 3.94}  # of 128 steps
MEASURED_DECODE_STEPS = 128
CACHED_SHARE = 0.95
BLOCK_TOKENS = 256


def cached_tokens(num_tokens: int) -> int:
    """How many tokens of a prompt Fig 14's cached case reuses, if it reuses whole blocks (an assumption)."""
    return int(num_tokens * CACHED_SHARE) // BLOCK_TOKENS * BLOCK_TOKENS


def paper_cost() -> EngineCost:
    """The fit."""
    return EngineCost(
        prefill=PrefillCost(
            base_s=0.068, per_token_s=_PER_TOKEN_S, per_square_s=7.79e-4 / _K**2, per_prefix_s=2.63e-3 / _K
        ),
        # The line is of one sequence, whose own token is part of the 26.28 ms.
        decode=DecodeCost(base_s=26.28e-3 - _PER_TOKEN_S, per_seq_s=_PER_TOKEN_S, per_kv_token_s=0.0355e-3 / 1000),
    )
