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
from operator import mul

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample
from moonpool.conductor.costs.accuracy import ErrorWindow
from moonpool.conductor.costs.nonnegative import nonnegative_minimum

_FADE = 0.98  # weight of a sample after each later one: about the last fifty count
_PRIOR_WEIGHT = 3e-4  # of the prior curve, in samples
_TRUSTED_RATIO = 1.5  # measured/predicted beyond this, either way, weighs less
_SCALE_STEP = 0.1  # how fast the prior curve's scale and the usual error follow
_SOON = 64  # samples of which each is believed at once
_REFIT_EVERY = 8  # later ones change little each
_MIN_SECONDS = 1e-6
_MAX_SECONDS = 86_400.0


class LearnedCost:
    """seconds = sum of coefficient_j x feature_j, fitted online; before any sample, the prior's coefficients."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(map(float, prior))
        self._gram = [[0.0] * len(self._prior) for _ in self._prior]
        self._moment = [0.0] * len(self._prior)
        self._log_scale = 0.0
        self._usual_off = 0.0
        self._terms: tuple[float, ...] | None = self._prior
        self.num_samples = 0

    @property
    def terms(self) -> tuple[float, ...]:
        """The coefficients, for callers that multiply by hand."""
        if self._terms is None:
            self._terms = self._fit()
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
        row = list(map(mul, self._prior, features))
        self._rescale(seconds / sum(row), weight)
        # Errors are relative to the larger of the two, so that none counts for more than 1.
        unit = max(seconds, predicted)
        self._add([each / unit for each in row], seconds / unit, weight)
        self.num_samples += 1
        if self.num_samples < _SOON or not self.num_samples % _REFIT_EVERY:
            self._terms = None

    def _add(self, row: list[float], target: float, weight: float) -> None:
        moment = self._moment
        for i, left in enumerate(row):
            scaled, gram = weight * left, self._gram[i]
            moment[i] = moment[i] * _FADE + scaled * target
            for j, right in enumerate(row):
                gram[j] = gram[j] * _FADE + scaled * right

    def _fit(self) -> tuple[float, ...]:
        scale = math.exp(self._log_scale)
        gram = [[each * scale * scale for each in row] for row in self._gram]
        for at, row in enumerate(gram):
            row[at] += _PRIOR_WEIGHT
        fitted = nonnegative_minimum(gram, [each * scale + _PRIOR_WEIGHT for each in self._moment])
        return tuple([each * scale * prior for each, prior in zip(fitted, self._prior, strict=True)])

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

    @property
    def ssd_terms(self) -> tuple[float, float]:
        """Coefficients of pulls from SSD. They go over the network too, so neither is below that of pulls from DRAM."""
        (fixed, per_byte), (ssd_fixed, ssd_per_byte) = self.transfer.terms, self.transfer_ssd.terms
        return max(fixed, ssd_fixed), max(per_byte, ssd_per_byte)

    def transfer_s(self, nbytes: float, ssd_nbytes: float = 0) -> float:
        """Time to pull that much from the pool, `ssd_nbytes` of it from SSD alone; nothing takes no time."""
        seconds = 0.0
        if nbytes > ssd_nbytes:
            fixed, per_byte = self.transfer.terms
            seconds += fixed + per_byte * (nbytes - ssd_nbytes)
        if ssd_nbytes > 0:
            fixed, per_byte = self.ssd_terms
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
