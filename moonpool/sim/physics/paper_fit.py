"""The paper's machine: LLaMA3-70B on 8 x A800, as measured in FAST'25 (shared/facts/paper.md D).

Prefill: the fit to all ten points of Fig 14 (within 4.3 %). Decode: the line through Fig 14's decode times, which are
of one sequence. Batches are not published; we assume that the KV of all sequences adds up and that each further token
of a step costs as much as a token of a prompt. `mooncake_cost` is for comparisons with the paper's own runs, whose
engine is slower in batches than this.
"""

from __future__ import annotations

from dataclasses import replace

from moonpool.sim.physics.cost import DecodeCost, EngineCost, PrefillCost

_K = 1024
_PER_TOKEN_S = 0.1123 / _K
_ALONE_S = 26.28e-3  # one decode step of one sequence without context
_MOONCAKE_SEQ_S = 4.0e-3

# Fig 14: tokens of the prompt -> seconds. The cached share of the second is 95 %, in whole blocks of 256 tokens.
MEASURED_PREFILL_S = {8 * _K: 1.00, 16 * _K: 2.05, 32 * _K: 4.48, 64 * _K: 10.59, 128 * _K: 27.51}
MEASURED_CACHED_PREFILL_S = {8 * _K: 0.135, 16 * _K: 0.227, 32 * _K: 0.406, 64 * _K: 0.882, 128 * _K: 2.328}
MEASURED_DECODE_S = {8 * _K: 3.39, 16 * _K: 3.44, 32 * _K: 3.52, 64 * _K: 3.66, 128 * _K: 3.94}  # of 128 steps
MEASURED_DECODE_STEPS = 128
CACHED_SHARE = 0.95
BLOCK_TOKENS = 256


def cached_tokens(num_tokens: int) -> int:
    """Return the tokens that Fig 14's cached case reuses of a prompt, if it reuses whole blocks (an assumption)."""
    return int(num_tokens * CACHED_SHARE) // BLOCK_TOKENS * BLOCK_TOKENS


def paper_cost() -> EngineCost:
    """Return the fit to Fig 14."""
    return EngineCost(
        prefill=PrefillCost(
            base_s=0.068, per_token_s=_PER_TOKEN_S, per_square_s=7.79e-4 / _K**2, per_prefix_s=2.63e-3 / _K
        ),
        # The line is of one sequence, whose own token is part of the 26.28 ms.
        decode=DecodeCost(base_s=_ALONE_S - _PER_TOKEN_S, per_seq_s=_PER_TOKEN_S, per_kv_token_s=0.0355e-3 / 1000),
    )


def mooncake_cost() -> EngineCost:
    """Return `paper_cost` with 4 ms per sequence of a decode batch, as in the paper's runs.

    The value is chosen so that the median TBT on the synthetic trace (Fig 7: 40 ms) is met at that trace's own rate,
    with 8 of 16 nodes decoding. It was first derived from the growth of TBT in Fig 15 and on the conversation trace
    (Fig 1), so these TBTs are no independent results. It holds for batches of about ten sequences, not for large
    ones: operations and bytes alone, as in `paper_cost`, are a thirtieth of it, and give 44 % of the published TBT on
    the conversation trace.
    """
    cost = paper_cost()
    decode = replace(cost.decode, base_s=_ALONE_S - _MOONCAKE_SEQ_S, per_seq_s=_MOONCAKE_SEQ_S)
    return EngineCost(cost.prefill, decode)


def chunk_cost() -> EngineCost:
    """Return `mooncake_cost` for prompts computed in chunks together with decodes.

    The base of each chunk is one pass through the model, as in a decode step, not the 68 ms of a whole prompt; the
    rest of the 68 ms, once per prompt, is left out. With 68 ms per chunk, chunks of 512 tokens would take 1.5 times as
    long as in Fig 8.
    """
    return mooncake_cost().in_chunks()
