"""Command lines in the style of upstream's programs: `--name=value`, `--name value`, `--name`, `--noname`. Pure.

A flag either has a meaning here, or is accepted and ignored with a stated reason, or is refused with one when it is
set. Any other name is an error that names the nearest flag.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moonpool.base.errors import ConfigError

FlagValue = str | int | float | bool
_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
_HELP = ("help", "h", "helpfull", "helpshort")
_DURATIONS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class ProgramFlag(NamedTuple):
    """A flag with a meaning. Its values have the type of the default."""

    default: FlagValue
    help: str


class FlagTable(NamedTuple):
    """The flags of a program. `ignored` maps a reason to the flags that have no effect because of it; `refused` maps a
    flag, which is a switch or a text, to the reason why it cannot be set.
    """

    flags: Mapping[str, ProgramFlag]
    ignored: Mapping[str, Sequence[str]]
    refused: Mapping[str, str]

    def parse(self, arguments: Sequence[str]) -> ParsedFlags:
        """Return the values of all flags, and which of those given are ignored. Raise ConfigError."""
        values: dict[str, FlagValue] = {name: flag.default for name, flag in self.flags.items()}
        given: set[str] = set()
        ignored: dict[str, str] = {}
        rest = list(arguments)
        reasons = {name: reason for reason, names in self.ignored.items() for name in names}
        while rest:
            name, text = self._name(rest.pop(0))
            if name in _HELP:
                return ParsedFlags(values, given, ignored, wants_help=True)
            if text is None and rest and not rest[0].startswith("-") and not self._is_switch(name):
                text = rest.pop(0)
            if name in self.flags:
                values[name] = _value(name, text, self.flags[name].default)
                given.add(name)
            elif name in self.refused:
                if text is None or (text != "" and text.lower() not in _FALSE):
                    raise ConfigError(f"--{name} is not supported: {self.refused[name]}", param=name)
            else:
                ignored[name] = reasons[name]
        return ParsedFlags(values, given, ignored, wants_help=False)

    def usage(self, program: str, summary: str) -> str:
        """Return the text of --help."""
        lines = [f"Usage: {program} [--flag=value ...]", "", *textwrap.wrap(summary, 110), "", "Flags:"]
        for name, (default, text) in self.flags.items():
            shown = str(default).lower() if isinstance(default, bool) else default
            lines.append(f"  --{name}={shown}")
            lines += textwrap.wrap(text, 104, initial_indent="      ", subsequent_indent="      ")
        lines += ["", "Refused when set:"]
        lines += [f"  --{name}: {reason}" for name, reason in self.refused.items()]
        lines += ["", "Accepted and without effect:"]
        for reason, names in self.ignored.items():
            lines += textwrap.wrap(", ".join(names), 106, initial_indent="  ", subsequent_indent="  ")
            lines.append(f"      {reason}")
        return "\n".join(lines)

    def _name(self, argument: str) -> tuple[str, str | None]:
        """Return the flag's name and its value, if it is in the same word."""
        if not argument.startswith("-") or argument in ("-", "--"):
            raise ConfigError(f"{argument!r} is no flag")
        name, has_value, text = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        known = {*self.flags, *self.refused, *_HELP, *(name for names in self.ignored.values() for name in names)}
        if name in known:
            return name, text if has_value else None
        if name.startswith("no") and name[2:] in known and not has_value:
            return name[2:], "false"
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise ConfigError(f"there is no flag --{name}{hint}")

    def _is_switch(self, name: str) -> bool:
        flag = self.flags.get(name)
        return flag is not None and isinstance(flag.default, bool)


class ParsedFlags(NamedTuple):
    values: Mapping[str, FlagValue]
    given: set[str]  # those with a meaning that were on the command line
    ignored: Mapping[str, str]  # given flags without effect, and the reasons
    wants_help: bool

    def text(self, name: str) -> str:
        return str(self.values[name])

    def integer(self, name: str) -> int:
        return int(self.values[name])

    def number(self, name: str) -> float:
        return float(self.values[name])

    def switch(self, name: str) -> bool:
        return bool(self.values[name])


def _value(name: str, text: str | None, default: FlagValue) -> FlagValue:
    if isinstance(default, bool):
        if text is None or text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ConfigError(f"--{name} is true or false, not {text!r}", param=name)
    if text is None:
        raise ConfigError(f"--{name} needs a value", param=name)
    try:
        return type(default)(text)
    except ValueError as error:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"--{name} is {kind}, not {text!r}", param=name) from error


def parse_duration_s(name: str, text: str) -> float:
    """Return the seconds of upstream's durations: milliseconds without a unit, or a number with ms, s, m or h."""
    digits = text.strip().rstrip("smh")
    unit = text.strip()[len(digits) :] or "ms"
    try:
        return float(digits) * _DURATIONS_S[unit]
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"--{name} is milliseconds, or a number with ms, s, m or h, not {text!r}", param=name
        ) from error
