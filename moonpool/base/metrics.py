"""Metrics that can travel. Each process counts in its own registry; the front end asks every role for a
snapshot and shows all of them on one page, told apart by the labels `role` and `instance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moonpool.base.rpc import Call


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    documentation: str
    kind: str
    samples: list[MetricSample]


class GetMetrics(Call[list[MetricFamily]]):
    """Every role answers this with a snapshot of its registry."""


def snapshot(registry: CollectorRegistry) -> list[MetricFamily]:
    """Everything the registry holds now, as plain data."""
    return [
        MetricFamily(
            family.name,
            family.documentation,
            family.type,
            [MetricSample(s.name, dict(s.labels), float(s.value)) for s in family.samples],
        )
        for family in registry.collect()
    ]


class MergedCollector(Collector):
    """Families of several processes as one exposition; same-named families become one with more labels."""

    def __init__(self, parts: Iterable[tuple[str, str, list[MetricFamily]]]) -> None:
        self._parts = list(parts)  # (role, instance, families)

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for role, instance, families in self._parts:
            for family in families:
                metric = merged.get(family.name)
                if metric is None:
                    metric = merged[family.name] = Metric(family.name, family.documentation, family.kind)
                for sample in family.samples:
                    labels = {"role": role, "instance": instance, **sample.labels}
                    metric.add_sample(sample.name, labels, sample.value)
        yield from merged.values()
