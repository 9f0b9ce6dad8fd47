"""Sizes as people write them: "2GB", "512MiB", and as they are shown to them: "2 GB". Bad text is a ConfigError."""

from __future__ import annotations

import re
from decimal import Decimal

from moonpool.base.errors import ConfigError

_SIZE = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZE[_letter] = _SIZE[_letter + "b"] = 1000**_power
    _SIZE[_letter + "ib"] = 1024**_power
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_nbytes(text: str | int) -> int:
    """Bytes in "2GB" (decimal), "2GiB" (binary) or a plain number."""
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"a size cannot be {text}")
        return text
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in _SIZE:
        raise ConfigError(f"{text!r} is not a size; write for example 512MB, 2GB or 2GiB")
    return int(Decimal(match[1]) * _SIZE[match[2].lower()])


def format_nbytes(nbytes: int) -> str:
    """Return the size for people, in the decimal units in which sizes are typed: 2_000_000_000 -> "2 GB".

    One decimal at most, none where it is 0.
    """
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(round(value, 1)) < 1000:
            return f"{value:.1f}".removesuffix(".0") + f" {unit}"
        value /= 1000
    return f"{value:.1f}".removesuffix(".0") + " TB"


def exact_size(nbytes: int) -> str:
    """Return the size as it is typed, without rounding: 2_000_000_000 -> "2GB"; parse_nbytes() gives it back."""
    units = [f"{letter}{unit}" for letter in "PTGM" for unit in ("B", "iB")] + ["kB", "KiB"]
    fitting = [unit for unit in units if nbytes and nbytes % _SIZE[unit.lower()] == 0]
    # The shortest number reads best: 256MiB rather than 268435456, 64GB rather than 64000MB.
    texts = [f"{nbytes // _SIZE[unit.lower()]}{unit}" for unit in fitting]
    return min(texts, key=len, default=str(nbytes))
