"""Samples tokens from logits. A token depends on (logits, tokens so far, params, position) and nothing else.

The uniform number of a draw is a hash of (seed, position), so a request that moves to another worker, or runs in
another batch, draws the same tokens. Every step works row by row: neighbours and their order do not matter.

Per row, in this order: barred tokens and penalties -> temperature -> min_p -> top_k -> top_p -> inverse CDF in
vocabulary order. Tokens that tie with the last one that a filter keeps are kept too. Log-probabilities are those of the
model's own distribution, before any of these.

No sampling value that SamplingParams accepts raises here or makes NaN: arithmetic is float32, and a value that vanishes
or overflows there acts as its limit (a temperature near 0 is greedy, a huge one uniform). A row without a usable
maximum (the model computed NaN, or every token is barred) gets its own error and does not affect other rows.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moonpool.base.errors import Internal, InvalidInput, MoonpoolError
from moonpool.engine.sequence import SamplingParams

_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# Stronger penalties act as this one: they would not change the order of tokens, but may overflow.
_STRONGEST = 1e30
_LEAST_LOGPROB = -9999.0  # sent instead of minus infinity, which JSON cannot represent


class Draw(NamedTuple):
    """A draw as numbers, for a sampler on a GPU. Temperature 0 takes the most likely token; top_k 0 means no top_k."""

    uniform: float
    temperature: float
    top_k: float
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The request behind one row of logits. `tokens` are prompt + output; the draw is for the next position."""

    params: SamplingParams
    tokens: Sequence[int]
    num_prompt_tokens: int
    barred: frozenset[int] = frozenset()  # tokens that must not be sampled next

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _TINY or self.params.top_k == 1

    @property
    def is_simple(self) -> bool:
        """Whether the outcome is a token drawn from the logits as they are, and nothing else."""
        return not self.is_adjusted and self.params.logprobs is None

    def draw(self, num_ahead: int) -> Draw:
        """Return how the token after the next `num_ahead` tokens is drawn."""
        params = self.params
        if self.is_greedy:
            return Draw(0.0, 0.0, 0.0, 1.0, 0.0)
        u = uniform(params.seed, len(self.tokens) + num_ahead)
        return Draw(u, min(params.temperature, _HUGE), float(params.top_k or 0), params.top_p, params.min_p)

    @property
    def is_adjusted(self) -> bool:
        return bool(self.barred) or self.params.penalizes


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most likely first


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1): the same for the same seed and position on every machine."""
    packed = struct.pack("<QQ", seed % 2**64, position)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"moonpool-draw").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | MoonpoolError]:
    """Return one outcome per row of `logits` [rows, vocab]: its token, or its error. `logits` is not changed."""
    assert logits.shape[0] == len(rows), "a row of logits per request"
    adjusted = _adjust(logits, rows) if any(row.is_adjusted for row in rows) else logits
    tokens, sound = _best(adjusted)
    if adjusted is not logits:  # a barred token may hide a NaN
        sound = [a and b for a, b in zip(sound, _best(logits)[1], strict=True)]
    random = [i for i, row in enumerate(rows) if sound[i] and not row.is_greedy]
    if random:
        drawn = _draw(adjusted[random], [rows[i] for i in random])
        for i, token in zip(random, drawn, strict=True):
            tokens[i] = token
    return [
        _with_logprobs(logits[i], row, tokens[i]) if sound[i] else _row_error(logits[i], row)
        for i, row in enumerate(rows)
    ]


def _best(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Return each row's most likely token, the first one on ties, and whether the row has a finite maximum."""
    best = logits.argmax(dim=-1, keepdim=True)  # the index of a NaN if there is one
    return best.squeeze(-1).tolist(), logits.gather(-1, best).squeeze(-1).isfinite().tolist()


def _row_error(logits: torch.Tensor, row: SampleRow) -> MoonpoolError:
    """Return why no token can be chosen from this row."""
    if logits.max().isfinite():
        message = "min_tokens cannot be reached: every token of the vocabulary is a stop token"
        return InvalidInput(message, param="stop_token_ids")
    return unusable_logits(row)


def unusable_logits(row: SampleRow) -> MoonpoolError:
    """Return the error of a row whose logits have no finite maximum."""
    return Internal(f"the model computed no usable probabilities for token {len(row.tokens)} of this request")


def _adjust(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    adjusted = logits.clone()
    for i, row in enumerate(rows):
        if row.params.penalizes:
            _penalize(adjusted[i], row)
        if row.barred:
            adjusted[i, [t for t in row.barred if 0 <= t < logits.shape[-1]]] = -torch.inf
    return adjusted


def _penalize(logits: torch.Tensor, row: SampleRow) -> None:
    """Change logits in place. Repetition counts prompt and output, presence and frequency the output only."""
    params = row.params
    if params.repetition_penalty != 1.0:
        factor = min(max(params.repetition_penalty, 1 / _STRONGEST), _STRONGEST)
        seen = _index(set(row.tokens), logits)
        values = logits[seen]
        logits[seen] = _bounded(torch.where(values > 0, values / factor, values * factor), values)
    counts = Counter(row.tokens[row.num_prompt_tokens :])
    if counts and (params.frequency_penalty or params.presence_penalty):
        times = torch.tensor([counts[t] for t in sorted(counts)], dtype=logits.dtype, device=logits.device)
        frequency, presence = (
            min(max(penalty, -_STRONGEST), _STRONGEST)
            for penalty in (params.frequency_penalty, params.presence_penalty)
        )
        seen = _index(counts, logits)
        values = logits[seen]
        logits[seen] = _bounded(values - (frequency * times + presence), values)


def _bounded(penalized: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the logits with overflows made finite. NaN stays NaN; a token that the model excluded stays excluded."""
    return penalized.clamp(-_HUGE, _HUGE).masked_fill_(before == -torch.inf, -torch.inf)


def _index(tokens: set[int] | Counter[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.long, device=like.device)


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Draw a token per row of logits [rows, vocab]: inverse CDF of the filtered distribution, in double precision."""
    # Neither 0 nor infinite in float32: 0 / 0 and -inf / inf would be NaN.
    temperature = _column([min(row.params.temperature, _HUGE) for row in rows], logits)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.to(logits.dtype)
    weights = scaled.exp_().double()  # the most likely token weighs 1
    if any(row.params.min_p > 0 for row in rows):
        floor = _column([row.params.min_p for row in rows], logits)
        weights = weights.masked_fill_(weights < floor, 0.0)
    weights = _filter(weights, rows)
    cumulative = weights.cumsum(dim=-1)
    u = _column([uniform(row.params.seed, len(row.tokens)) for row in rows], logits)
    # The first token whose cumulative weight exceeds the target; u < 1, but the product may round up.
    target = torch.minimum(u * cumulative[:, -1:], torch.nextafter(cumulative[:, -1:], torch.zeros_like(u)))
    picked: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(-1).tolist()
    return picked


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _filter(weights: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Apply top_k and top_p: weights below a row's threshold become 0."""
    filtered = [i for i, row in enumerate(rows) if row.params.top_k is not None or row.params.top_p < 1]
    if not filtered:
        return weights
    own = weights if len(filtered) == len(rows) else weights[filtered]
    thresholds = torch.zeros(len(rows), 1, dtype=weights.dtype, device=weights.device)
    thresholds[filtered] = _thresholds(own, [rows[i].params for i in filtered])
    return weights.masked_fill_(weights < thresholds, 0.0)


def _thresholds(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the least weight that each row keeps [rows, 1]."""
    vocab = weights.shape[-1]
    total = weights.sum(dim=-1, keepdim=True)
    top_p = _column([p.top_p for p in params], weights)
    # All tokens lighter than this weigh less than 1 - top_p together, so none of them is in the nucleus:
    # only the few above it need sorting.
    candidates = (weights >= total * (1 - top_p) / vocab).sum(dim=-1).tolist()
    ks = [count if p.top_k is None else min(p.top_k, vocab) for p, count in zip(params, candidates, strict=True)]
    ordered = weights.topk(max(ks), dim=-1).values  # largest first
    k = torch.tensor(ks, device=weights.device).unsqueeze(-1)
    kept = ordered.masked_fill(torch.arange(max(ks), device=weights.device) >= k, 0.0)
    cumulative = kept.cumsum(dim=-1)
    has_k = torch.tensor([[p.top_k is not None] for p in params], device=weights.device)
    wanted = torch.where(has_k, cumulative[:, -1:], total) * top_p
    # A token is kept if the tokens before it have less than the wanted mass.
    num_kept = (cumulative - kept < wanted).sum(dim=-1, keepdim=True)
    return ordered.gather(-1, torch.minimum(num_kept, k).clamp_(min=1) - 1)


def _with_logprobs(logits: torch.Tensor, row: SampleRow, token: int) -> SampledToken:
    if row.params.logprobs is None:
        return SampledToken(token)
    logprobs = logits.float().log_softmax(dim=-1).clamp_(min=_LEAST_LOGPROB)
    best = logprobs.topk(min(row.params.logprobs, logprobs.shape[-1]))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return SampledToken(token, logprobs[token].item(), top)
