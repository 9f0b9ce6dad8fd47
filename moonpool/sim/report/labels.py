"""Figures of an outcome for people: what a number is called, with its unit, and how it is written. Pure.

The names in an outcome carry units (`ttft_s_p90`, `dram_nbytes_per_node`, `hit_share`); here they become "TTFT p90, s",
"DRAM per node" with a size, and "prompt tokens reused" with a percentage.
"""

from __future__ import annotations

from moonpool.base.units import format_nbytes
from moonpool.sim.report.scale import short

_LONG = 1e9  # numbers from here on are told with three figures
_NAMES = {
    "effective_share": "done within both targets",
    "goodput_per_s": "goodput, requests/s",
    "num_requests": "requests",
    "num_done": "requests done",
    "num_refused": "requests refused",
    "num_lost": "requests lost with workers",
    "num_retries": "requests tried again",
    "num_unfinished": "requests never done",
    "num_wasted_prefills": "prefills whose request was refused afterwards",
    "prefill_gpu_s": "prefill time of a node's GPUs, s",
    "prefill_gpu_s_mean": "prefill time of a request, mean, s",
    "saved_gpu_s": "prefill time saved by reuse, s",
    "last_end_s": "last request done at, s",
    "hit_share": "prompt tokens reused",
    "hit_share_local": "  from the GPUs' own pages",
    "hit_share_dram": "  from own memory",
    "hit_share_remote": "  from others' memory",
    "hit_share_ssd": "  from disks",
    "gpus_per_node": "GPUs per node",
    "gpu": "GPU",
    "times": "where times come from",
    "kv_tokens_per_node_gpus": "tokens of KV in a node's GPUs",
}
_WORDS = {"kv": "KV", "dram": "DRAM", "ssd": "SSD", "ttft": "TTFT", "tbt": "TBT", "h2d": "memory to GPUs", "nic": "NIC"}


def label(name: str) -> str:
    """Return what the number of that name is called, with its unit unless the value shows it."""
    if name in _NAMES:
        return _NAMES[name]
    words = [_WORDS.get(word, word) for word in name.split("_") if word not in ("nbytes", "share")]
    if "nbytes" in name and words[-2:] == ["per", "s"]:
        words = words[:-2]
    unit = ""
    if "s" in words:  # ttft_s_p90
        words.remove("s")
        unit = ", s"
    return " ".join(words) + unit


def shown(name: str, value: str | int | float) -> str:
    """Return the value as people read it: sizes and rates with their unit, shares as percentages."""
    if isinstance(value, str):
        return value
    if "nbytes" in name:
        return format_nbytes(int(value)) + ("/s" if name.endswith("_per_s") else "")
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value == int(value) and value < _LONG else short(value)
