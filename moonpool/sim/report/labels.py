"""Labels and sentences of a report and of `moonpool replay`: the name and format of each number, the conclusion. Pure.

The names in an outcome carry units (`ttft_s_p90`, `dram_nbytes_per_node`, `hit_share`); here they become "TTFT p90, s",
"DRAM per node" with a size, and "prompt tokens reused" with a percentage.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.units import format_nbytes
from moonpool.sim.outcome import Outcome
from moonpool.sim.report.chart import short
from moonpool.sim.systems import BASELINE, FULL

_LONG = 1e9  # numbers from here on are shown with three digits
_NAMES = {
    "effective_share": "done within both targets",
    "goodput_per_s": "goodput, requests/s",
    "num_requests": "requests",
    "num_done": "requests done",
    "num_refused": "requests refused",
    "num_lost": "requests lost with workers",
    "num_retries": "requests tried again",
    "num_role_changes": "changes of nodes' roles",
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
_IN_MS = "tbt_s_"  # times between tokens are shown in milliseconds
_WORDS = {"kv": "KV", "dram": "DRAM", "ssd": "SSD", "ttft": "TTFT", "tbt": "TBT", "h2d": "memory to GPUs", "nic": "NIC"}


def label(name: str) -> str:
    """Return the label of a number, with its unit unless the formatted value shows it."""
    if name in _NAMES:
        return _NAMES[name]
    words = [_WORDS.get(word, word) for word in name.split("_") if word not in ("nbytes", "share")]
    if "nbytes" in name and words[-2:] == ["per", "s"]:
        words = words[:-2]
    unit = ""
    if "s" in words:  # ttft_s_p90
        words.remove("s")
        unit = ", ms" if name.startswith(_IN_MS) else ", s"
    return " ".join(words) + unit


def format_value(name: str, value: str | int | float) -> str:
    """Format a value: sizes and rates with their unit, shares as percentages."""
    if isinstance(value, str):
        return value
    if "nbytes" in name:
        return format_nbytes(int(value)) + ("/s" if name.endswith("_per_s") else "")
    if "share" in name:
        return f"{value:.1%}"
    if name.startswith(_IN_MS):
        return f"{value * 1e3:.1f}"
    return f"{value:,.0f}" if value == int(value) and value < _LONG else short(value)


_SAME = 0.001  # shares of requests that differ by less count as equal
_ENOUGH = 0.9  # below this share of requests the targets count as missed


def system_numbers(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the number of each system's colour: 0 for the full system, 1 for the baseline, then in order."""
    pinned = {FULL: 0, BASELINE: 1}
    others = iter(range(len(pinned), len(pinned) + len(outcomes)))
    return [pinned[each.system] if each.system in pinned else next(others) for each in outcomes]


def headline(outcomes: Sequence[Outcome]) -> str:
    """Return the answer in one line: whether these machines are enough, and how the best system compares."""
    ranked = sorted(outcomes, key=lambda each: -each.numbers["effective_share"])
    best = ranked[0]
    share = best.numbers["effective_share"]
    enough = "enough" if share >= _ENOUGH else "not enough"
    text = f"{best.machine.get('nodes')} nodes are {enough}: {best.system} serves {share:.1%} of the requests in time"
    if len(ranked) == 1:
        return text
    second = ranked[1]
    return f"{text}, {'next ' if len(ranked) > 2 else ''}{second.system} {second.numbers['effective_share']:.1%}"


def conclusion(outcomes: Sequence[Outcome]) -> str:
    """Return one or two sentences: which system serves most requests within both targets, and if it is enough."""
    ranked = sorted(outcomes, key=lambda each: -each.numbers["effective_share"])
    best = ranked[0]
    text = f"{_served(best)} within TTFT {best.ttft_target_s:g} s and TBT {best.tbt_target_s * 1e3:g} ms"
    return " ".join([f"{text}{_comparison(ranked)}.", *_reuse(best), *_remark(best)])


def _served(outcome: Outcome) -> str:
    numbers = outcome.numbers
    return f"{outcome.system} serves {numbers['effective_share']:.1%} of {numbers['num_requests']:,.0f} requests"


def _comparison(ranked: Sequence[Outcome]) -> str:
    best = ranked[0].numbers["effective_share"]
    same = [each for each in ranked[1:] if best - each.numbers["effective_share"] < _SAME]
    behind = [each for each in ranked[1:] if each not in same]
    words = f", and {_listed([each.system for each in same])} as many" if same else ""
    if behind:
        words += "; " + _listed([f"{each.system} {each.numbers['effective_share']:.1%}" for each in behind])
    return words


def _reuse(best: Outcome) -> list[str]:
    share, saved_s = best.numbers["hit_share"], best.numbers["saved_gpu_s"]
    if not share:
        return []
    computed_s = best.numbers["prefill_gpu_s"]
    saved = f", which saves {saved_s / (saved_s + computed_s):.0%} of the prefill time" if saved_s > 0 else ""
    return [f"{best.system} reuses {share:.1%} of the prompt tokens{saved}."]


def _remark(best: Outcome) -> list[str]:
    if best.numbers["effective_share"] >= _ENOUGH:
        return []
    nodes = best.machine.get("nodes")
    return [f"This load is too much for {nodes} nodes, or the targets are too tight: try more --nodes or less --load."]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
