"""What goes wrong when: nodes that crash, and nodes whose network is slow or carries nothing for a while. Pure.

p3@600+120          node p3 crashes at 600 s and is back, empty, 120 s later
p3@600              it never comes back
d0@600+120:slow=4   its network has a quarter of its bandwidth for 120 s
d0@600+120:frozen   it carries nothing for 120 s; what is on its way waits
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from moonpool.base.errors import InvalidInput

Kind = Literal["crash", "slow", "frozen"]
_NUMBER = r"\d+(?:\.\d+)?"
_TEXT = re.compile(rf"(?P<node>[a-z]+\d+)@(?P<at>{_NUMBER})(?:\+(?P<lasts>{_NUMBER}))?(?::(?P<kind>.+))?")
_SLOW = re.compile(rf"slow=({_NUMBER})")
_FORMS = "p3@600+120, p3@600, d0@600+120:slow=4 or d0@600+120:frozen"


@dataclass(frozen=True)
class Failure:
    """`lasts_s` None: for good. A slow network has 1 / `factor` of its bandwidth."""

    at_s: float
    node: str
    lasts_s: float | None = None
    kind: Kind = "crash"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf or (self.lasts_s is not None and not 0 < self.lasts_s < math.inf):
            raise InvalidInput(f"{self.node} cannot fail at {self.at_s:g} s for {self.lasts_s} s")
        if self.kind == "slow" and not 1 < self.factor < math.inf:
            raise InvalidInput(f"{self.node}: a slow network is more than 1 times slower, not {self.factor:g}")
        if self.kind == "frozen" and self.lasts_s is None:
            raise InvalidInput(f"{self.node}: a network that is frozen for good would keep its requests for ever")

    @property
    def end_s(self) -> float:
        return math.inf if self.lasts_s is None else self.at_s + self.lasts_s

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f"+{self.lasts_s:g}"
        kind = {"crash": "", "slow": f":slow={self.factor:g}", "frozen": ":frozen"}[self.kind]
        return f"{self.node}@{self.at_s:g}{lasts}{kind}"


def parse_failure(text: str) -> Failure:
    """As people type it. InvalidInput says how."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is no failure; write {_FORMS}")
    lasts_s = None if found["lasts"] is None else float(found["lasts"])
    kind, factor = _kind(found["kind"], text)
    return Failure(float(found["at"]), found["node"], lasts_s, kind, factor)


def _kind(text: str | None, whole: str) -> tuple[Kind, float]:
    if text is None or text == "crash":
        return "crash", 1.0
    if text == "frozen":
        return "frozen", 1.0
    slow = _SLOW.fullmatch(text)
    if slow is None:
        raise InvalidInput(f"{whole!r} is no failure; write {_FORMS}")
    return "slow", float(slow[1])


def check_schedule(failures: Iterable[Failure], nodes: Collection[str]) -> None:
    """InvalidInput where a node is unknown, or is to crash while it is down."""
    crashes: dict[str, list[Failure]] = {}
    for failure in failures:
        if failure.node not in nodes:
            raise InvalidInput(f"there is no node {failure.node!r}; there are {_listed(list(nodes))}")
        if failure.kind == "crash":
            crashes.setdefault(failure.node, []).append(failure)
    for node, each in crashes.items():
        each.sort(key=lambda failure: failure.at_s)
        for first, second in pairwise(each):
            if second.at_s <= first.end_s:
                raise InvalidInput(f"{node} cannot crash at {second.at_s:g} s: it is down since {first.at_s:g} s")


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 8 else f"{nodes[0]} to {nodes[-1]}"
