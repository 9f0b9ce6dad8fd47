"""How good predictions are: the relative errors of the last ones, per model. Pure.

An error is predicted / measured - 1: positive where too much was predicted. Those that cannot be had (nothing measured)
are left out.
"""

from __future__ import annotations

from collections import deque

from moonpool.conductor.messages import PredictionError

_WINDOW = 256
_LARGEST = 100.0  # no single error counts for more


class ErrorWindow:
    """The last `_WINDOW` errors of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._errors: deque[float] = deque(maxlen=_WINDOW)
        self._count = 0

    def add(self, predicted_s: float, measured_s: float) -> None:
        if measured_s > 0:
            self._errors.append(min(predicted_s / measured_s - 1, _LARGEST))
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
