"""What things cost, learnt from what they did cost. Pure.

Each model is a sum of non-negative coefficients times features of the work, so that it is never negative and
never falls when the work grows. The coefficients minimise the relative error over recent samples (old ones
fade), pulled a little towards a prior curve that the first samples scale to this machine: one sample calibrates
the curve, more of them bend it. Samples far off the prediction weigh less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import mul

import numpy as np
from numpy.typing import NDArray

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample
from moonpool.conductor.accuracy import ErrorWindow

Vector = NDArray[np.float64]

_FADE = 0.98  # weight of a sample after each later one: about the last fifty count
_PRIOR_WEIGHT = 3e-4  # of the prior curve, in samples
_TRUSTED_RATIO = 1.5  # measured/predicted beyond this, either way, weighs less
_SCALE_STEP = 0.1  # how fast the prior curve's scale and the usual error follow
_MIN_SECONDS = 1e-6
_MAX_SECONDS = 86_400.0


class LearnedCost:
    """seconds = sum of coefficient_j x feature_j, fitted online; before any sample, the prior's coefficients."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior: Vector = np.asarray(prior, dtype=np.float64)
        self._gram: Vector = np.zeros((len(prior), len(prior)))
        self._moment: Vector = np.zeros(len(prior))
        self._log_scale = 0.0
        self._usual_off = 0.0
        self._fitted: Vector | None = self._prior
        self._terms: tuple[float, ...] | None = None
        self.num_samples = 0

    @property
    def terms(self) -> tuple[float, ...]:
        """The coefficients as plain floats: what fast callers multiply by hand."""
        if self._terms is None:
            self._terms = tuple(self.coefficients().tolist())
        return self._terms

    def predict(self, features: Sequence[float]) -> float:
        return float(sum(map(mul, self.terms, features)))

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Takes one measurement in; impossible ones (not positive, over a day, not a number) are ignored."""
        if not 0 < seconds <= _MAX_SECONDS:
            return
        seconds = max(seconds, _MIN_SECONDS)
        predicted = max(self.predict(features), _MIN_SECONDS) if self.num_samples else seconds
        weight = self._trust(seconds / predicted)
        self._rescale(seconds / float(np.dot(self._prior, features)), weight)
        # Errors are relative to the larger of the two, so that none counts for more than 1.
        unit = max(seconds, predicted)
        row = self._prior * np.asarray(features, dtype=np.float64) / unit
        self._gram = self._gram * _FADE + weight * np.outer(row, row)
        self._moment = self._moment * _FADE + weight * row * (seconds / unit)
        self.num_samples += 1
        self._fitted = self._terms = None

    def coefficients(self) -> Vector:
        if self._fitted is None:
            scale = math.exp(self._log_scale)
            gram = self._gram * scale**2 + _PRIOR_WEIGHT * np.eye(len(self._prior))
            moment = self._moment * scale + _PRIOR_WEIGHT
            self._fitted = _nonnegative_minimum(gram, moment) * scale * self._prior
        return self._fitted

    def _trust(self, ratio: float) -> float:
        """1 for what was expected, falling with the distance. When all are far off, it is the model that is wrong."""
        off = abs(math.log(ratio))
        limit = max(math.log(_TRUSTED_RATIO), 2 * self._usual_off)
        # One wild sample moves the usual error by a bounded step.
        self._usual_off += _SCALE_STEP * (min(off, 2.0) - self._usual_off)
        return 1.0 if self.num_samples < 8 or off <= limit else (limit / off) ** 2

    def _rescale(self, ratio: float, weight: float) -> None:
        step = weight * max(_SCALE_STEP, 1 / (self.num_samples + 1))
        self._log_scale += step * (math.log(ratio) - self._log_scale)


def _nonnegative_minimum(gram: Vector, moment: Vector) -> Vector:
    """argmin over x >= 0 of x'Gx - 2x'm, exactly: the best feasible solution over all supports (there are few)."""
    best, best_value = np.zeros(len(moment)), 0.0
    for size in range(len(moment), 0, -1):
        for support in combinations(range(len(moment)), size):
            chosen = list(support)
            try:
                part = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            except np.linalg.LinAlgError:
                continue  # these features cannot be told apart by the samples; a smaller support can do as well
            value = -float(np.dot(part, moment[chosen]))
            if value < best_value and bool((part >= 0).all()):
                best, best_value = np.zeros(len(moment)), value
                best[chosen] = part
        if size == len(moment) and best_value < 0:
            return best  # no bound is touched: nothing can be better, and it is the usual case
    return best


# Priors in the shape of paper.md D, in the size of a small model on a CPU; the first sample rescales them.
def _prefill_prior() -> LearnedCost:
    return LearnedCost((0.02, 1e-3, 7e-9, 2e-5))


def _decode_prior() -> LearnedCost:
    return LearnedCost((0.03, 2e-3, 1e-6))


def _transfer_prior() -> LearnedCost:
    return LearnedCost((1e-3, 1e-9))


def _ssd_prior() -> LearnedCost:
    return LearnedCost((2e-3, 2e-9))


def _error_windows() -> dict[str, ErrorWindow]:
    return {name: ErrorWindow(name) for name in ("prefill", "decode", "transfer", "transfer_ssd")}


@dataclass(slots=True)
class CostModels:
    """The models of one cluster of like workers. `transfer` is from the pool's DRAM, `transfer_ssd` from its SSDs."""

    prefill: LearnedCost = field(default_factory=_prefill_prior)
    decode: LearnedCost = field(default_factory=_decode_prior)
    transfer: LearnedCost = field(default_factory=_transfer_prior)
    transfer_ssd: LearnedCost = field(default_factory=_ssd_prior)
    errors: dict[str, ErrorWindow] = field(default_factory=_error_windows)

    def prefill_s(self, num_tokens: int, prefix_tokens: int) -> float:
        """Time to compute tokens prefix_tokens..num_tokens; a full hit still computes the last token."""
        fixed, per_token, per_pair, per_prefix = self.prefill.terms
        prefix = min(prefix_tokens, num_tokens - 1)
        pairs = float(num_tokens) * num_tokens - float(prefix) * prefix
        return fixed + per_token * (num_tokens - prefix) + per_pair * pairs + per_prefix * prefix

    def decode_step_s(self, num_seqs: float, kv_tokens: float) -> float:
        """Time between tokens of a batch of that many sequences with that many tokens of KV together."""
        fixed_s, per_seq_s, per_token_s = self.decode.terms
        return fixed_s + per_seq_s * num_seqs + per_token_s * kv_tokens

    def transfer_s(self, nbytes: float, ssd_nbytes: float = 0) -> float:
        """Time to pull that much from the pool, `ssd_nbytes` of it from SSD alone; nothing takes no time."""
        seconds = 0.0
        if nbytes > ssd_nbytes:
            fixed, per_byte = self.transfer.terms
            seconds += fixed + per_byte * (nbytes - ssd_nbytes)
        if ssd_nbytes > 0:
            fixed, per_byte = self.transfer_ssd.terms
            seconds += fixed + per_byte * ssd_nbytes
        return seconds

    def learn(
        self,
        prefills: Iterable[PrefillSample] = (),
        decodes: Iterable[DecodeSample] = (),
        pulls: Iterable[PullSample] = (),
    ) -> None:
        """Takes in what a worker measured. Samples without work say nothing and are left out."""
        for prefill in prefills:
            if prefill.num_tokens > prefill.prefix_tokens >= 0:
                features = _prefill_features(prefill.num_tokens, prefill.prefix_tokens)
                self._take("prefill", self.prefill, features, prefill.seconds)
        for decode in decodes:
            if decode.num_seqs > 0 and decode.kv_tokens >= 0:
                self._take("decode", self.decode, (1.0, decode.num_seqs, decode.kv_tokens), decode.seconds)
        for pull in pulls:
            if pull.nbytes > 0:
                self._learn_pull(pull)

    def _learn_pull(self, pull: PullSample) -> None:
        """From two tiers at once: what DRAM's part is believed to have taken is set off, and the SSD learns."""
        dram_nbytes = pull.nbytes - pull.ssd_nbytes
        if pull.ssd_nbytes <= 0:
            self._take("transfer", self.transfer, (1.0, pull.nbytes), pull.seconds)
        elif pull.ssd_nbytes >= dram_nbytes:
            seconds = pull.seconds - (self.transfer_s(dram_nbytes) if dram_nbytes > 0 else 0.0)
            self._take("transfer_ssd", self.transfer_ssd, (1.0, pull.ssd_nbytes), seconds)

    def _take(self, name: str, model: LearnedCost, features: Sequence[float], seconds: float) -> None:
        """The error is that of the prediction before it learnt; one that stands on no sample at all is none."""
        if model.num_samples and 0 < seconds <= _MAX_SECONDS:
            self.errors[name].add(model.predict(features), seconds)
        model.learn(features, seconds)


def _prefill_features(num_tokens: int, prefix_tokens: int) -> tuple[float, float, float, float]:
    prefix = min(prefix_tokens, num_tokens - 1)
    return 1.0, num_tokens - prefix, float(num_tokens) ** 2 - float(prefix) ** 2, prefix
