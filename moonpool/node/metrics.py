"""A node's figures in the form that all roles use for their metrics."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.base.frames import DamageCount
from moonpool.base.metrics import MetricFamily, MetricSample
from moonpool.node.ssd import SsdStats
from moonpool.store.messages import OrderKind

# On the page before they happen, so that Prometheus sees the first one as an increase.
_USUAL_ENDS = ("closed", "stalled", "refused", "pushed out", "not let in")
_SSD_COUNTS = (
    "num_objects",
    "num_files",
    "num_drained_files",
    "num_corrupt",
    "num_torn",
    "num_unreadable_files",
    "num_salvaged",
    "damaged_nbytes",
)

_NO_ORDERS = {(kind, "done"): 0 for kind in OrderKind}


def node_metrics(
    dram_nbytes: int,
    num_sessions: int,
    orders: Mapping[tuple[OrderKind, str], int],
    ssd: SsdStats | None,
    connections: tuple[int, Mapping[str, int]] = (0, {}),
    num_restamped: int = 0,
    *,
    mapped_nbytes: int = 0,
) -> list[MetricFamily]:
    """`orders` counts by kind and outcome ("done" or an error's code); `ssd` is None where there is no disk;
    `connections` are those to the memory's tcp port, open and ended by reason; `mapped_nbytes` of the memory were
    mapped in since the start.
    """
    tiers = [
        ({"tier": "dram", "state": "offered"}, dram_nbytes),
        ({"tier": "dram", "state": "mapped"}, mapped_nbytes),
    ]
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
                for (kind, outcome), count in sorted({**_NO_ORDERS, **orders}.items())
            ],
        ),
    ]
    num_open, ended = connections
    ended = {**dict.fromkeys(_USUAL_ENDS, 0), **ended}
    families += [
        _family("moonpool_node_connections", "connections to the memory's tcp port", "gauge", [({}, num_open)]),
        _counter("connections_ended", "connections to the memory's tcp port, by why they ended", "reason", ended),
        _counter("damaged_frames", "frames received whose checksum did not match", "", {"": DamageCount.total}),
        _counter("restamped_granules", "granules stamped with a generation never given out", "", {"": num_restamped}),
    ]
    if ssd is not None:
        counts = [({"what": name.removeprefix("num_")}, int(getattr(ssd, name))) for name in _SSD_COUNTS]
        families.append(_family("moonpool_node_ssd_log", "counts of the SSD log", "gauge", counts))
    return families


def _counter(name: str, documentation: str, label: str, values: Mapping[str, int]) -> MetricFamily:
    """Without a label there is one value."""
    name = f"moonpool_node_{name}"
    samples = [
        MetricSample(f"{name}_total", {label: value} if label else {}, count) for value, count in sorted(values.items())
    ]
    return MetricFamily(name, documentation, "counter", samples)


def _family(name: str, documentation: str, kind: str, values: list[tuple[dict[str, str], int]]) -> MetricFamily:
    return MetricFamily(name, documentation, kind, [MetricSample(name, label, value) for label, value in values])
