"""What vLLM measures too, under vLLM's names, so that boards and autoscalers made for vLLM work here. Pure.

The series are made from Moonpool's own when the page is read; nothing is counted twice. They have vLLM's label
`model_name` beside those of their process, so a sum over all of them is that of the service. Only what means the same
is here; docs/operations.md names what is not, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from moonpool.base.metrics import MetricFamily, MetricSample, RoleMetrics

_PROMPT, _CACHED = "moonpool_prompt_tokens", "moonpool_cached_tokens"
_FREE, _PAGES = "moonpool_worker_free_pages", "moonpool_worker_num_pages"


class _Renamed(NamedTuple):
    """A metric of Moonpool that has the same meaning."""

    own: str
    documentation: str


_SAME = {
    "vllm:time_to_first_token_seconds": _Renamed("moonpool_ttft_seconds", "Time to first token"),
    "vllm:inter_token_latency_seconds": _Renamed("moonpool_tbt_seconds", "Time between tokens"),
    "vllm:e2e_request_latency_seconds": _Renamed("moonpool_answer_seconds", "From a request's start to its last token"),
    "vllm:request_queue_time_seconds": _Renamed("moonpool_queue_seconds", "How long requests waited to be computed"),
    "vllm:prompt_tokens": _Renamed(_PROMPT, "Prompt tokens"),
    "vllm:generation_tokens": _Renamed("moonpool_output_tokens", "Generated tokens"),
    "vllm:prefix_cache_queries": _Renamed(_PROMPT, "Prompt tokens looked up in workers' own pages"),
    "vllm:num_requests_running": _Renamed("moonpool_worker_num_running", "Requests in running batches"),
}
# Both are queues of the service; a request is in one of them at a time.
_WAITING = ("moonpool_worker_num_waiting", "moonpool_conductor_waiting")


def with_vllm_names(part: RoleMetrics, model_name: str) -> RoleMetrics:
    """Return the metrics of one process, and those of them that vLLM has too under vLLM's names."""
    own = {family.name: family for family in part.families}
    more = [*_renamed(own, model_name), *_derived(own, model_name)]
    return msgspec.structs.replace(part, families=[*part.families, *more]) if more else part


def _renamed(own: dict[str, MetricFamily], model_name: str) -> Iterator[MetricFamily]:
    for name, (own_name, text) in _SAME.items():
        family = own.get(own_name)
        if family is not None:
            samples = [
                MetricSample(each.name.replace(own_name, name), {**each.labels, "model_name": model_name}, each.value)
                for each in family.samples
            ]
            yield MetricFamily(name, text, family.kind, samples)


def _derived(own: dict[str, MetricFamily], model_name: str) -> Iterator[MetricFamily]:
    def family(name: str, text: str, kind: str, value: float) -> MetricFamily:
        sample = f"{name}_total" if kind == "counter" else name
        return MetricFamily(name, text, kind, [MetricSample(sample, {"model_name": model_name}, value)])

    def value_of(name: str, holds: Callable[[dict[str, str]], bool] = lambda _: True) -> float:
        return sum(each.value for each in own[name].samples if holds(each.labels))

    if _CACHED in own:
        local = value_of(_CACHED, lambda labels: labels["source"] == "local")
        pool = value_of(_CACHED, lambda labels: labels["source"] == "pool")
        yield family("vllm:prefix_cache_hits", "Prompt tokens found in workers' own pages", "counter", local)
        looked_up = value_of(_PROMPT) - local
        queries, hits = "Prompt tokens looked up in the pool", "Prompt tokens found in the pool"
        yield family("vllm:external_prefix_cache_queries", queries, "counter", looked_up)
        yield family("vllm:external_prefix_cache_hits", hits, "counter", pool)
    for name in _WAITING:
        if name in own:
            yield family("vllm:num_requests_waiting", "Requests that wait to be computed", "gauge", value_of(name))
    if _PAGES in own and value_of(_PAGES):
        used = 1.0 - value_of(_FREE) / value_of(_PAGES)
        yield family("vllm:kv_cache_usage_perc", "Share of KV pages in use; 1: all of them", "gauge", used)
