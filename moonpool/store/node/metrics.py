"""A node's figures in the form that all roles use for their metrics."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.base.metrics import MetricFamily, MetricSample
from moonpool.store.messages import OrderKind
from moonpool.store.ssd import SsdStats

_SSD_COUNTS = ("num_objects", "num_files", "num_drained_files", "num_corrupt", "num_torn", "num_unreadable_files")


def node_metrics(
    dram_nbytes: int,
    num_sessions: int,
    orders: Mapping[tuple[OrderKind, str], int],
    ssd: SsdStats | None,
) -> list[MetricFamily]:
    """`orders` counts by kind and outcome ("done" or an error's code); `ssd` is None where there is no disk."""
    tiers = [({"tier": "dram", "state": "offered"}, dram_nbytes)]
    if ssd is not None:
        nbytes = {"live": ssd.live_nbytes, "dead": ssd.dead_nbytes, "free": ssd.free_nbytes}
        tiers += [({"tier": "ssd", "state": state}, value) for state, value in nbytes.items()]
    families = [
        _family("moonpool_node_bytes", "a node's bytes by tier", "gauge", tiers),
        _family("moonpool_node_sessions", "processes that map the memory", "gauge", [({}, num_sessions)]),
        MetricFamily(
            "moonpool_node_orders",
            "what the master ordered, by kind and outcome",
            "counter",
            [
                MetricSample("moonpool_node_orders_total", {"kind": kind.name.lower(), "outcome": outcome}, count)
                for (kind, outcome), count in sorted(orders.items())
            ],
        ),
    ]
    if ssd is not None:
        counts = [({"what": name.removeprefix("num_")}, int(getattr(ssd, name))) for name in _SSD_COUNTS]
        families.append(_family("moonpool_node_ssd_log", "counts of the SSD log", "gauge", counts))
    return families


def _family(name: str, documentation: str, kind: str, values: list[tuple[dict[str, str], int]]) -> MetricFamily:
    return MetricFamily(name, documentation, kind, [MetricSample(name, label, value) for label, value in values])
