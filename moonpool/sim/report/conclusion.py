"""What a replay comes to, in one or two sentences: the last lines of `moonpool replay` and the headline of its report.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.sim.outcome import Outcome

_SAME = 0.001  # shares of requests that differ by less are told as equal
_ENOUGH = 0.9  # a share of requests below which the targets count as missed


def conclusion(outcomes: Sequence[Outcome]) -> str:
    """Say which system serves most requests within both targets, by how much, and whether that is enough."""
    ranked = sorted(outcomes, key=lambda each: -each.numbers["effective_share"])
    best = ranked[0]
    said = f"{_served(best)} within TTFT {best.ttft_target_s:g} s and TBT {best.tbt_target_s * 1e3:g} ms"
    return " ".join([f"{said}{_against(ranked)}.", *_reuse(best), *_remark(best)])


def _served(outcome: Outcome) -> str:
    numbers = outcome.numbers
    return f"{outcome.system} serves {numbers['effective_share']:.1%} of {numbers['num_requests']:,.0f} requests"


def _against(ranked: Sequence[Outcome]) -> str:
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
