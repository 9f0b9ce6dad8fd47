"""The paper's machine: LLaMA3-70B on 8 x A800, by what FAST'25 measured (shared/facts/paper.md D).

Prefill: the fit to all ten points of Fig 14 (within 4.3 %). Decode: the line through Fig 14's decode times, which are
of one sequence. Batches are not published; assumed: KV of all sequences adds up, and each further token of a step
costs what a token of a prompt costs. `mooncake_cost` is for comparisons with the paper's own runs: its engine is slower
in batches than that.
"""

from __future__ import annotations

from dataclasses import replace

from moonpool.sim.physics.cost import DecodeCost, EngineCost, PrefillCost

_K = 1024
_PER_TOKEN_S = 0.1123 / _K
_ALONE_S = 26.28e-3  # a step of one sequence without context
_MOONCAKE_SEQ_S = 4.0e-3

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
        decode=DecodeCost(base_s=_ALONE_S - _PER_TOKEN_S, per_seq_s=_PER_TOKEN_S, per_kv_token_s=0.0355e-3 / 1000),
    )


def mooncake_cost() -> EngineCost:
    """With what a sequence cost in the paper's batches: 4 ms, so that Mooncake's median TBT on the synthetic trace
    (Fig 7: 40 ms) comes out at that trace's own rate, 8 of 16 nodes decoding. The value was first seen in how
    TBT grows in Fig 15 and on the conversation trace (Fig 1), so their TBT is no independent result either. It is
    good for batches of some ten sequences, as there, not for large ones: operations and bytes alone, which `paper_cost`
    has, are a thirtieth of it. With those, TBT on the conversation trace is 44 % of the published."""
    cost = paper_cost()
    decode = replace(cost.decode, base_s=_ALONE_S - _MOONCAKE_SEQ_S, per_seq_s=_MOONCAKE_SEQ_S)
    return EngineCost(cost.prefill, decode)


def chunk_cost() -> EngineCost:
    """`mooncake_cost` where prompts are computed in chunks beside decodes. What each chunk adds to its tokens' work is
    a pass through the model, as a decode step's is, not the 68 ms of a prompt, whose remainder comes once per prompt
    and is left out. With all of it in every chunk, chunks of 512 tokens take half as long again as Fig 8 says."""
    return mooncake_cost().in_chunks()
