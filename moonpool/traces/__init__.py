"""Traces of requests: read and write them, describe them, change them, generate them.

trace = read_jsonl("conversation_trace.jsonl")
print(describe(trace).hit_tokens)
twice = scale_load(trace, 2.0)
"""

from moonpool.traces.changes import (
    change_rate,
    label,
    merge,
    relabel,
    rescale_blocks,
    scale_load,
    slice_count,
    slice_time,
)
from moonpool.traces.columns import Trace, TraceRequest
from moonpool.traces.distributions import POISSON, Arrivals
from moonpool.traces.mooncake_jsonl import read_jsonl, write_jsonl
from moonpool.traces.reuse import NEVER, hit_curve, reuse_distances
from moonpool.traces.statistics import TraceStatistics, describe

__all__ = [
    "NEVER",
    "POISSON",
    "Arrivals",
    "Trace",
    "TraceRequest",
    "TraceStatistics",
    "change_rate",
    "describe",
    "hit_curve",
    "label",
    "merge",
    "read_jsonl",
    "relabel",
    "rescale_blocks",
    "reuse_distances",
    "scale_load",
    "slice_count",
    "slice_time",
    "write_jsonl",
]
