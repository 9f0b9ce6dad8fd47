"""Costs from measured steps, by the solver that the conductor's estimates use. Pure.

Least squares of the relative error with coefficients >= 0, over all samples alike (the conductor's own fit lets old
ones fade). What the samples cannot tell apart is given to the fewest coefficients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.base.errors import InvalidInput
from moonpool.conductor.costs.nonnegative import nonnegative_minimum
from moonpool.sim.physics.cost import DecodeCost, EngineCost, Overhead, PrefillCost

_RIDGE = 1e-12  # of a column's own length: keeps a feature that no sample has from making the system singular


def profile_cost(
    prefills: Iterable[PrefillSample], decodes: Iterable[DecodeSample], overhead: Overhead | None = None
) -> EngineCost:
    """The costs that explain the samples best. Raises InvalidInput where a kind has no sample with work in it."""
    return EngineCost(prefill=fit_prefill(prefills), decode=fit_decode(decodes), overhead=overhead or Overhead())


def fit_prefill(samples: Iterable[PrefillSample]) -> PrefillCost:
    """What a cached prefix costs in them is its reading: workers leave out how long they waited for it to come."""
    used = [each for each in samples if each.num_tokens > each.prefix_tokens >= 0 and each.seconds > 0]
    features = [_prefill_features(float(each.num_tokens), float(each.prefix_tokens)) for each in used]
    base, per_token, per_square, per_masked, per_context = _fit(features, [each.seconds for each in used], "prefill")
    return PrefillCost(
        base_s=base,
        per_token_s=per_token,
        per_square_s=per_square,
        per_masked_s=per_masked,
        per_context_s=per_context,
    )


def _prefill_features(total: float, prefix: float) -> tuple[float, ...]:
    new = total - prefix
    return 1.0, new, total * total - prefix * prefix, new * new, prefix


def fit_decode(samples: Iterable[DecodeSample]) -> DecodeCost:
    used = [each for each in samples if each.num_seqs > 0 and each.kv_tokens >= 0 and each.seconds > 0]
    features = [(1.0, float(each.num_seqs > 1), each.num_seqs, each.kv_tokens) for each in used]
    base, batched, per_seq, per_kv_token = _fit(features, [each.seconds for each in used], "decode")
    return DecodeCost(base_s=base, batched_s=batched, per_seq_s=per_seq, per_kv_token_s=per_kv_token)


def _fit(features: Sequence[Sequence[float]], seconds: Sequence[float], kind: str) -> list[float]:
    if not features:
        raise InvalidInput(f"the profile has no {kind} sample")
    rows: NDArray[np.float64] = np.asarray(features) / np.asarray(seconds)[:, None]  # each should add up to 1
    lengths = np.linalg.norm(rows, axis=0)
    lengths[lengths == 0] = 1.0
    rows /= lengths
    gram = rows.T @ rows + _RIDGE * np.eye(rows.shape[1])
    fitted = nonnegative_minimum(gram.tolist(), rows.sum(axis=0).tolist())
    return [each / length for each, length in zip(fitted, lengths.tolist(), strict=True)]
