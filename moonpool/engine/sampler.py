"""From logits to tokens. What is drawn depends on (logits, tokens so far, params, position) and nothing else.

The uniform number of a draw is a hash of (seed, position), so a request that moves to another worker, or runs in
another batch, draws the same tokens. Every step works row by row: neighbours and their order do not matter.

The order of things, per row: bars and penalties -> temperature -> min_p -> top_k -> top_p -> inverse CDF in
vocabulary order. Tokens that tie with the last one a filter keeps are kept too. Log-probabilities are those of
the model's own distribution, before any of this.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moonpool.engine.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The request behind one row of logits. `tokens` are prompt + output; the draw is for the next position."""

    params: SamplingParams
    tokens: Sequence[int]
    num_prompt_tokens: int
    barred: frozenset[int] = frozenset()  # tokens that must not come next

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0 or self.params.top_k == 1

    @property
    def is_adjusted(self) -> bool:
        return bool(self.barred) or self.params.penalizes


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most likely first


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): the same for the same seed and position, on every machine."""
    packed = struct.pack("<QQ", seed % 2**64, position)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"moonpool-draw").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token per row of `logits` [rows, vocab]; `logits` is not changed."""
    assert logits.shape[0] == len(rows), "a row of logits per request"
    adjusted = _adjust(logits, rows) if any(row.is_adjusted for row in rows) else logits
    tokens: list[int] = adjusted.argmax(dim=-1).tolist()  # the first index on ties
    random = [i for i, row in enumerate(rows) if not row.is_greedy]
    if random:
        drawn = _draw(adjusted[random], [rows[i] for i in random])
        for i, token in zip(random, drawn, strict=True):
            tokens[i] = token
    if all(row.params.logprobs is None for row in rows):
        return [SampledToken(token) for token in tokens]
    return [_with_logprobs(logits[i], row, token) for i, (row, token) in enumerate(zip(rows, tokens, strict=True))]


def _adjust(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    adjusted = logits.clone()
    for i, row in enumerate(rows):
        if row.params.penalizes:
            _penalize(adjusted[i], row)
        if row.barred:
            adjusted[i, [t for t in row.barred if 0 <= t < logits.shape[-1]]] = -torch.inf
    return adjusted


def _penalize(logits: torch.Tensor, row: SampleRow) -> None:
    """In place. Repetition looks at prompt and output, presence and frequency at the output alone."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _index(set(row.tokens), logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    counts = Counter(row.tokens[row.num_prompt_tokens :])
    if counts and (params.frequency_penalty or params.presence_penalty):
        times = torch.tensor([counts[t] for t in sorted(counts)], dtype=logits.dtype, device=logits.device)
        logits[_index(counts, logits)] -= params.frequency_penalty * times + params.presence_penalty


def _index(tokens: set[int] | Counter[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.long, device=like.device)


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Inverse CDF over the filtered distribution, summed in double precision. logits [rows, vocab]."""
    temperature = _column([row.params.temperature for row in rows], logits)
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
    """Applies top_k and top_p: weights below a row's threshold become 0."""
    filtered = [i for i, row in enumerate(rows) if row.params.top_k is not None or row.params.top_p < 1]
    if not filtered:
        return weights
    own = weights if len(filtered) == len(rows) else weights[filtered]
    thresholds = torch.zeros(len(rows), 1, dtype=weights.dtype, device=weights.device)
    thresholds[filtered] = _thresholds(own, [rows[i].params for i in filtered])
    return weights.masked_fill_(weights < thresholds, 0.0)


def _thresholds(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The least weight that each row keeps [rows, 1]."""
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
    # A token is kept when those before it do not make up the wanted mass.
    num_kept = (cumulative - kept < wanted).sum(dim=-1, keepdim=True)
    return ordered.gather(-1, torch.minimum(num_kept, k).clamp_(min=1) - 1)


def _with_logprobs(logits: torch.Tensor, row: SampleRow, token: int) -> SampledToken:
    if row.params.logprobs is None:
        return SampledToken(token)
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(row.params.logprobs, logprobs.shape[-1]))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return SampledToken(token, logprobs[token].item(), top)
