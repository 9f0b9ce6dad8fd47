"""Where memory lies, as text and as a value: "cpu:0", "cpu", "cuda:0", "ssd:/path". The topology's matrix uses the
same words.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

from moonpool.base.errors import ConfigError

Kind = Literal["cpu", "cuda", "ssd"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_INDEX = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Location:
    """`index` is the NUMA node or the GPU; None: memory of this machine, node unknown. `path` is for "ssd" only."""

    kind: Kind
    index: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"{self.kind}:{self.path}"
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse_location(text: str) -> Location:
    """ConfigError, naming what was expected, for anything that is not one of the four forms."""
    kind, colon, rest = text.partition(":")
    if kind == "ssd" and os.path.isabs(rest) and rest.isprintable():
        return Location("ssd", path=rest)
    if kind == "cpu" and not colon:
        return Location("cpu")
    if kind in ("cpu", "cuda") and _INDEX.fullmatch(rest):
        return Location("cpu" if kind == "cpu" else "cuda", int(rest))
    raise ConfigError(f"{text!r} is no memory location; say {_expected(kind)}")


def _expected(kind: str) -> str:
    forms = {"cpu": '"cpu" or "cpu:<NUMA node>"', "cuda": '"cuda:<GPU>"', "ssd": '"ssd:/absolute/path"'}
    return forms.get(kind) or ", ".join(forms[known] for known in _KINDS)
