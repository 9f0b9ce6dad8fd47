"""Cost models of prefill, decode and transfer, learnt from measurements, and the errors of their predictions. Pure.

Each model is a sum of non-negative coefficients times features of the work, so it is never negative and never falls
when the work grows. The coefficients minimise the relative error over recent samples (old ones fade), pulled slightly
towards a prior curve that the first samples scale to this machine: one sample calibrates the curve, more samples bend
it. Samples far from the prediction weigh less.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import mul
from typing import TypeVar

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample
from moonpool.conductor.messages import DecisionRecord, PredictionError

S = TypeVar("S")
_WINDOW = 256
_MAX_ERROR = 100.0  # no single error counts for more
_SINGULAR = 1e-300
_FADE = 0.98  # weight of a sample after each later one: about the last fifty count
_PRIOR_WEIGHT = 3e-4  # of the prior curve, in samples
_TRUSTED_RATIO = 1.5  # samples with measured / predicted beyond this, either way, weigh less
_SCALE_STEP = 0.1  # how fast the prior curve's scale and the usual error follow
_SOON = 64  # the first samples, after each of which the model is fitted
_REFIT_EVERY = 8  # later samples change little each
_MIN_SECONDS = 1e-6
_MAX_SECONDS = 86_400.0
_MAX_NODES = 1024
_OTHER_RATIO = 1.25


class ErrorWindow:
    """The relative errors (predicted / measured - 1) of one model's last `_WINDOW` predictions; positive: the
    prediction was too high."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._errors: deque[float] = deque(maxlen=_WINDOW)
        self._count = 0

    def add(self, predicted_s: float, measured_s: float) -> None:
        if measured_s > 0:
            self._errors.append(min(predicted_s / measured_s - 1, _MAX_ERROR))
            self._count += 1

    def summary(self) -> PredictionError:
        sizes = sorted(abs(error) for error in self._errors)
        if not sizes:
            return PredictionError(model=self._model)
        return PredictionError(
            model=self._model,
            count=self._count,
            p50=sizes[len(sizes) // 2],
            p90=sizes[len(sizes) * 9 // 10],
            bias=sum(self._errors) / len(self._errors),
        )


class RequestErrors:
    """The errors of predictions for whole requests."""

    def __init__(self) -> None:
        self.windows = {name: ErrorWindow(name) for name in ("ttft", "tbt")}

    def add(self, record: DecisionRecord) -> None:
        """Measure the predictions of a request that went as planned; one that was routed again is left out."""
        if record.outcome != "done" or record.attempt > 1:
            return
        if record.predicted_ttft_s is not None and record.measured_ttft_s is not None:
            self.windows["ttft"].add(record.predicted_ttft_s, record.measured_ttft_s)
        if record.predicted_tbt_s is not None and record.measured_tbt_s is not None:
            self.windows["tbt"].add(record.predicted_tbt_s, record.measured_tbt_s)


def nonnegative_minimum(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """Return the exact argmin over x >= 0 of x'Gx - 2x'm: the best feasible solution over all supports (there are few).

    In plain floats: for systems of four rows one numpy call costs more than all the arithmetic.
    """
    count = len(moment)
    best, best_value = [0.0] * count, 0.0
    for size in range(count, 0, -1):
        for support in combinations(range(count), size):
            part = _solve([[gram[i][j] for j in support] for i in support], [moment[i] for i in support])
            if part is None or min(part) < 0:
                continue  # singular: the samples cannot separate these features, and a smaller support fits as well
            value = -sum([x * moment[i] for x, i in zip(part, support, strict=True)])
            if value < best_value:
                best, best_value = [0.0] * count, value
                for x, i in zip(part, support, strict=True):
                    best[i] = x
        if size == count and best_value < 0:
            return best  # the usual case: no bound is active, so no other support is better
    return best


def _solve(rows: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve by elimination with pivots; return None if the system is singular. Both arguments are overwritten."""
    count = len(right)
    for at in range(count):
        pivot = max(range(at, count), key=lambda row: abs(rows[row][at]))
        if not abs(rows[pivot][at]) > _SINGULAR:
            return None
        if pivot != at:
            rows[at], rows[pivot] = rows[pivot], rows[at]
            right[at], right[pivot] = right[pivot], right[at]
        top = rows[at]
        for below in range(at + 1, count):
            factor = rows[below][at] / top[at]
            if factor:
                row = rows[below]
                for column in range(at + 1, count):
                    row[column] -= factor * top[column]
                right[below] -= factor * right[at]
    for at in range(count - 1, -1, -1):
        row = rows[at]
        for column in range(at + 1, count):
            right[at] -= row[column] * right[column]
        right[at] /= row[at]
    return right


class LearnedCost:
    """seconds = sum of coefficient_j * feature_j, fitted online; before the first sample, the prior's coefficients."""

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
        """The coefficients, for callers that multiply themselves."""
        if self._terms is None:
            self._terms = self._fit()
        return self._terms

    def predict(self, features: Sequence[float]) -> float:
        return float(sum(map(mul, self.terms, features)))

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Add one measurement; impossible ones (not positive, over a day, not a number) are ignored."""
        if not 0 < seconds <= _MAX_SECONDS:
            return
        seconds = max(seconds, _MIN_SECONDS)
        predicted = max(self.predict(features), _MIN_SECONDS) if self.num_samples else seconds
        weight = self._trust(seconds / predicted)
        row = list(map(mul, self._prior, features))
        self._rescale(seconds / sum(row), weight)
        # Errors are relative to the larger of the two, so that no error counts for more than 1.
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
        """Return the weight of a sample: 1 near the prediction, less far from it. If all samples are far from the
        prediction, the model is wrong and they keep their weight."""
        off = abs(math.log(ratio))
        limit = max(math.log(_TRUSTED_RATIO), 2 * self._usual_off)
        # One outlier moves the usual error by a bounded step.
        self._usual_off += _SCALE_STEP * (min(off, 2.0) - self._usual_off)
        return 1.0 if self.num_samples < 8 or off <= limit else (limit / off) ** 2

    def _rescale(self, ratio: float, weight: float) -> None:
        step = weight * max(_SCALE_STEP, 1 / (self.num_samples + 1))
        self._log_scale += step * (math.log(ratio) - self._log_scale)


_LEARNT_PER_S, _MAX_BURST = 100.0, 1000.0  # samples of a kind; each takes about 50 us


class SampleThinning:
    """Leaves samples of one kind out where there are many: a model follows the last fifty, and a thousand busy workers
    measure 30,000 steps in a second. Which ones is left to chance, so every worker's samples count."""

    def __init__(self) -> None:
        self._left, self._at_s = _MAX_BURST, 0.0
        self._draw = random.Random(0)

    def take(self, samples: Sequence[S], now_s: float) -> Sequence[S]:
        """Return the samples to learn from."""
        if not samples:
            return samples
        self._left = min(_MAX_BURST, self._left + _LEARNT_PER_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        if len(samples) > self._left:
            samples = self._draw.sample(samples, int(max(0.0, self._left) + self._draw.random()))
        self._left -= len(samples)
        return samples


# The priors have the shape of the paper's cost model and the size of a small model on a CPU; the first sample scales
# them.
def _prefill_prior() -> LearnedCost:
    return LearnedCost((0.02, 1e-3, 7e-9, 2e-5))


def _decode_prior() -> LearnedCost:
    return LearnedCost((0.03, 2e-3, 1e-6))


def _transfer_prior() -> LearnedCost:
    return LearnedCost((1e-3, 1e-9))


def _ssd_prior() -> LearnedCost:
    return LearnedCost((2e-3, 2e-9))


def _handoff_prior() -> LearnedCost:
    return LearnedCost((5e-3, 1e-10))


_MODELS = ("prefill", "decode", "transfer", "transfer_ssd", "handoff")


@dataclass(slots=True)
class CostModels:
    """The models of equal workers. `kind` names these where there are others (placement/kinds.py). `transfer` is from
    the pool's DRAM, `transfer_ssd` from its SSDs; `handoff` is what is left of a hand-off when the prompt is computed.
    `transfer` learns from all pulls, `near` from those of nodes on the worker's machine, `nodes` from those of each
    node on another machine; `other_paths` are those (near: "") that take clearly other times than pulls in general.
    """

    prefill: LearnedCost = field(default_factory=_prefill_prior)
    decode: LearnedCost = field(default_factory=_decode_prior)
    transfer: LearnedCost = field(default_factory=_transfer_prior)
    transfer_ssd: LearnedCost = field(default_factory=_ssd_prior)
    handoff: LearnedCost = field(default_factory=_handoff_prior)
    near: LearnedCost = field(default_factory=_transfer_prior)
    nodes: dict[str, LearnedCost] = field(default_factory=dict)
    other_paths: set[str] = field(default_factory=set)
    kind: str = ""
    errors: dict[str, ErrorWindow] = field(init=False)

    def __post_init__(self) -> None:
        of_kind = f" ({self.kind})" if self.kind else ""
        self.errors = {name: ErrorWindow(name + of_kind) for name in _MODELS}

    def prefill_s(self, num_tokens: int, prefix_tokens: int) -> float:
        """Return the time to compute tokens prefix_tokens..num_tokens; a full hit still computes the last token."""
        fixed, per_token, per_pair, per_prefix = self.prefill.terms
        prefix = min(prefix_tokens, num_tokens - 1)
        pairs = float(num_tokens) * num_tokens - float(prefix) * prefix
        return fixed + per_token * (num_tokens - prefix) + per_pair * pairs + per_prefix * prefix

    def decode_step_s(self, num_seqs: float, kv_tokens: float) -> float:
        """Return the time between tokens of a batch of `num_seqs` sequences with `kv_tokens` tokens of KV in total."""
        fixed_s, per_seq_s, per_token_s = self.decode.terms
        return fixed_s + per_seq_s * num_seqs + per_token_s * kv_tokens

    @property
    def ssd_terms(self) -> tuple[float, float]:
        """The coefficients of pulls from SSD. These use the network too, so neither is below that of pulls from
        DRAM."""
        (fixed, per_byte), (ssd_fixed, ssd_per_byte) = self.transfer.terms, self.transfer_ssd.terms
        return max(fixed, ssd_fixed), max(per_byte, ssd_per_byte)

    def transfer_s(self, nbytes: float, ssd_nbytes: float = 0) -> float:
        """Return the time to pull `nbytes` from the pool, `ssd_nbytes` of them from SSD; 0 for 0 bytes."""
        seconds = 0.0
        if nbytes > ssd_nbytes:
            fixed, per_byte = self.transfer.terms
            seconds += fixed + per_byte * (nbytes - ssd_nbytes)
        if ssd_nbytes > 0:
            fixed, per_byte = self.ssd_terms
            seconds += fixed + per_byte * ssd_nbytes
        return seconds

    def path_terms(self, node: str, is_near: bool) -> tuple[float, ...]:
        """The coefficients of pulls from that node's memory; those of all pulls before one came from there."""
        path = self.near if is_near else self.nodes.get(node)
        return self.transfer.terms if path is None or not path.num_samples else path.terms

    def handoff_s(self, nbytes: float) -> float:
        """Return the time from the end of a prefill until the decode worker has its KV of `nbytes`; 0 before the first
        measurement, because most of it has gone over while the prompt was computed."""
        return self.handoff.predict((1.0, nbytes)) if self.handoff.num_samples else 0.0

    def learn_handoff(self, nbytes: int, seconds: float) -> None:
        """Add one measurement."""
        self._learn("handoff", self.handoff, (1.0, nbytes), seconds)

    def learn(
        self,
        prefills: Iterable[PrefillSample] = (),
        decodes: Iterable[DecodeSample] = (),
        pulls: Iterable[PullSample] = (),
    ) -> None:
        """Add a worker's measurements. Samples without work are ignored."""
        for prefill in prefills:
            if prefill.num_tokens > prefill.prefix_tokens >= 0:
                features = _prefill_features(prefill.num_tokens, prefill.prefix_tokens)
                self._learn("prefill", self.prefill, features, prefill.seconds)
        for decode in decodes:
            if decode.num_seqs > 0 and decode.kv_tokens >= 0:
                self._learn("decode", self.decode, (1.0, decode.num_seqs, decode.kv_tokens), decode.seconds)
        for pull in pulls:
            if pull.nbytes > 0:
                self._learn_pull(pull)

    def _learn_pull(self, pull: PullSample) -> None:
        """Of a pull from both tiers, subtract the predicted time of DRAM's part and give the rest to the SSD's
        model."""
        dram_nbytes = pull.nbytes - pull.ssd_nbytes
        if pull.ssd_nbytes <= 0:
            self._learn("transfer", self.transfer, (1.0, pull.nbytes), pull.seconds)
            self._learn_path(pull)
        elif pull.ssd_nbytes >= dram_nbytes:
            seconds = pull.seconds - (self.transfer_s(dram_nbytes) if dram_nbytes > 0 else 0.0)
            self._learn("transfer_ssd", self.transfer_ssd, (1.0, pull.ssd_nbytes), seconds)

    def _learn_path(self, pull: PullSample) -> None:
        if pull.is_near:
            name, path = "", self.near
        elif pull.node in self.nodes or (pull.node and len(self.nodes) < _MAX_NODES):
            name, path = pull.node, self.nodes.setdefault(pull.node, _transfer_prior())
        else:
            return
        path.learn((1.0, pull.nbytes), pull.seconds)
        own_s, usual_s = path.predict((1.0, pull.nbytes)), self.transfer.predict((1.0, pull.nbytes))
        if max(own_s, usual_s) > _OTHER_RATIO * min(own_s, usual_s):
            self.other_paths.add(name)
        else:
            self.other_paths.discard(name)

    def _learn(self, name: str, model: LearnedCost, features: Sequence[float], seconds: float) -> None:
        """Record the error of the prediction before this sample; a prediction without any sample has no error."""
        if model.num_samples and 0 < seconds <= _MAX_SECONDS:
            self.errors[name].add(model.predict(features), seconds)
        model.learn(features, seconds)


def _prefill_features(num_tokens: int, prefix_tokens: int) -> tuple[float, float, float, float]:
    prefix = min(prefix_tokens, num_tokens - 1)
    return 1.0, num_tokens - prefix, float(num_tokens) ** 2 - float(prefix) ** 2, prefix
