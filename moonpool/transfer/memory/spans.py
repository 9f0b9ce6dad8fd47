"""Stretches of a segment, as (offset, nbytes). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Spans: TypeAlias = list[tuple[int, int]]


def merge_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """What they cover: those that follow each other are one, empty ones are left out."""
    merged: Spans = []
    for offset, nbytes in spans:
        if nbytes:
            extend_spans(merged, offset, nbytes)
    return merged


def extend_spans(spans: Spans, offset: int, nbytes: int) -> None:
    """Adds one at the end, or makes the last one longer."""
    if spans and sum(spans[-1]) == offset:
        spans[-1] = (spans[-1][0], spans[-1][1] + nbytes)
    else:
        spans.append((offset, nbytes))
