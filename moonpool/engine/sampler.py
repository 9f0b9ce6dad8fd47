"""Samples tokens from logits. A token depends on (logits, tokens so far, params, position) and nothing else.

The uniform number of a draw is a hash of (seed, position), so a request that moves to another worker, or runs in
another batch, draws the same tokens. Every step works row by row: neighbours and their order do not matter.

Per row, in this order: penalties and barred tokens -> temperature -> min_p -> top_k -> top_p -> inverse CDF in
vocabulary order. Tokens that tie with the last one that a filter keeps are kept too. Log-probabilities are those of the
model's own distribution, before any of these.

No sampling value that SamplingParams accepts raises here or makes NaN: arithmetic is float32, and a value that vanishes
or overflows there acts as its limit (a temperature near 0 is greedy, a huge one uniform). A row without a usable
maximum (the model computed NaN, or every token is barred) gets its own error and does not affect other rows.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from moonpool.base.errors import Internal, InvalidInput, MoonpoolError
from moonpool.engine.penalties import CountSlots, Penalties, SeenTokens, count_tokens, fits_16_bits
from moonpool.engine.sequence import SamplingParams

_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_LEAST_LOGPROB = -9999.0  # sent instead of minus infinity, which JSON cannot represent
# In place of the token of a row that has none: its logits have no finite maximum, or every possible token is barred.
UNUSABLE, ALL_BARRED = -1, -2


class Draw(NamedTuple):
    """How a token is drawn, as numbers for a GPU. Temperature 0 takes the most likely token; top_k 0 means no top_k."""

    uniform: float
    temperature: float
    top_k: float
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The request behind one row of logits. `tokens` are prompt + output, without the `num_ahead` (0 or 1) sampled ones
    that are not read yet; the draw is for the position behind them."""

    params: SamplingParams
    tokens: Sequence[int]
    num_prompt_tokens: int
    barred: frozenset[int] = frozenset()  # tokens that must not be sampled next
    num_ahead: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _TINY or self.params.top_k == 1

    @property
    def position(self) -> int:
        """The number of tokens before the one to be sampled."""
        return len(self.tokens) + self.num_ahead

    def draw(self) -> Draw:
        params, penalties = self.params, Penalties.of(self.params)
        if self.is_greedy:
            return Draw(0.0, 0.0, 0.0, 1.0, 0.0, *penalties)
        u, temperature = uniform(params.seed, self.position), min(params.temperature, _HUGE)
        return Draw(u, temperature, float(params.top_k or 0), params.top_p, params.min_p, *penalties)

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


class Adjusted(NamedTuple):
    """Logits after penalties and bars, [rows, vocab], and the most likely token of each row as most_likely() says."""

    logits: torch.Tensor
    best: list[int]


class LogitsAdjuster(Protocol):
    """Applies penalties and barred tokens. It keeps the counts of the sequences that it has seen, so that a step adds
    the newest tokens only."""

    def adjusted(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> AbstractContextManager[Adjusted]:
        """Return a context that gives the adjusted logits. Afterwards `logits` are what they were before.

        What makes a row unusable, NaN or infinity, stays in it: no penalty and no bar hides it.
        """


class HostAdjuster:
    """The LogitsAdjuster of the CPU, for at most `num_slots` rows at once."""

    def __init__(self, num_slots: int, max_seq_tokens: int) -> None:
        self._slots = CountSlots(num_slots)
        self._wide = not fits_16_bits(max_seq_tokens)
        self._seen: dict[int, SeenTokens] = {}

    @contextmanager
    def adjusted(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Iterator[Adjusted]:
        # In place and back again: a copy of the logits alone would take as long as many penalties.
        own = logits.float().contiguous()
        values, before = own.numpy(), list[tuple[int, np.ndarray, np.ndarray]]()
        try:
            self._penalize(values, rows, before)
            _bar(values, rows, before)
            # NumPy's argmax takes a tenth of the time of torch's, whose rule for ties and NaN is the same.
            yield Adjusted(own, values.argmax(axis=-1).tolist())
        except BaseException:
            self._slots.clear()
            raise
        finally:
            for i, tokens, old in reversed(before):
                values[i, tokens] = old

    def _penalize(
        self, values: np.ndarray, rows: Sequence[SampleRow], before: list[tuple[int, np.ndarray, np.ndarray]]
    ) -> None:
        penalized = [(i, row) for i, row in enumerate(rows) if row.params.penalizes]
        places = self._slots.place([(row.tokens, row.num_prompt_tokens) for _, row in penalized])
        for (i, row), place in zip(penalized, places, strict=True):
            if place.is_new:
                counts = count_tokens(row.tokens, row.num_prompt_tokens, values.shape[-1], wide=self._wide)
                self._seen[place.slot] = SeenTokens(counts)
            elif place.is_due:
                self._seen[place.slot].add(row.tokens[-1])
            with np.errstate(all="ignore"):
                before.append((i, *self._seen[place.slot].penalize(values[i], Penalties.of(row.params))))


def _bar(values: np.ndarray, rows: Sequence[SampleRow], before: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
    for i, row in enumerate(rows):
        barred = np.array([t for t in row.barred if 0 <= t < values.shape[-1]], dtype=np.int64)
        if len(barred):
            old = values[i, barred]
            values[i, barred] = np.where(np.isfinite(old), -np.inf, old)
            before.append((i, barred, old))


@torch.inference_mode()
def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], adjuster: LogitsAdjuster | None = None
) -> list[SampledToken | MoonpoolError]:
    """Return one outcome per row of `logits` [rows, vocab]: its token, or its error. `logits` are not changed.

    Without an `adjuster`, which has counted the tokens of the step before, each row's tokens are counted now; the
    logits are then on the CPU, or no row is adjusted.
    """
    assert logits.shape[0] == len(rows), "a row of logits per request"
    if not any(row.is_adjusted for row in rows):
        tokens = _choose(Adjusted(logits, most_likely(logits)), rows)
    else:
        adjuster = adjuster or HostAdjuster(len(rows), max(row.position for row in rows))
        with adjuster.adjusted(logits, rows) as adjusted:
            tokens = _choose(adjusted, rows)
    return [
        _row_error(logits[i], row) if token is None else _with_logprobs(logits[i], row, token)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True))
    ]


def most_likely(logits: torch.Tensor) -> list[int]:
    """Return the most likely token of each row: the first one on ties, the first NaN if there is one."""
    best: list[int] = logits.argmax(dim=-1).tolist()
    return best


def _choose(adjusted: Adjusted, rows: Sequence[SampleRow]) -> list[int | None]:
    """Return the token of each row; None where the logits have no finite maximum."""
    logits, tokens = adjusted.logits, list(adjusted.best)
    best = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    sound: list[bool] = logits.gather(-1, best).squeeze(-1).isfinite().tolist()
    random = [i for i, row in enumerate(rows) if sound[i] and not row.is_greedy]
    if random:
        drawn = _draw(logits[random], [rows[i] for i in random])
        for i, token in zip(random, drawn, strict=True):
            tokens[i] = token
    return [token if is_sound else None for token, is_sound in zip(tokens, sound, strict=True)]


def _row_error(logits: torch.Tensor, row: SampleRow) -> MoonpoolError:
    """Return why no token can be chosen from this row."""
    return sampling_error(ALL_BARRED if logits.max().isfinite() else UNUSABLE, row)


def sampling_error(reason: int, row: SampleRow) -> MoonpoolError:
    """Return the error of a row without a token, for UNUSABLE or ALL_BARRED."""
    if reason == ALL_BARRED:
        message = "min_tokens cannot be reached: every token of the vocabulary is a stop token"
        return InvalidInput(message, param="stop_token_ids")
    return Internal(f"the model computed no usable probabilities for token {row.position} of this request")


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
    logprobs = log_probabilities(logits)
    best = logprobs.topk(min(row.params.logprobs, logprobs.shape[-1]))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return SampledToken(token, logprobs[token].item(), top)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities that clients see, for logits [..., vocab]."""
    return logits.float().log_softmax(dim=-1).clamp_(min=_LEAST_LOGPROB)
