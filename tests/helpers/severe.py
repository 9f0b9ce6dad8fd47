"""Failures that get no second chance: a wrong byte, a wrong token, a lost acknowledged object, a leftover process.

A test may fail once because its host is slow. None of these ever comes from a slow host, so the gate (tests/gate) fails
at the first one. It recognises them by their class, wherever one stands in the chain of exceptions of a failed test.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_NBYTES = 16


class SevereError(AssertionError):
    """The system broke a promise that no load excuses."""


class WrongBytes(SevereError):
    """Somebody got bytes that nobody stored there."""


class WrongToken(SevereError):
    """An answer has another token than the model gives."""


class LostObject(SevereError):
    """An object that was acknowledged is not there, or one that was removed is there again."""


class LeftoverProcess(SevereError):
    """A process outlived the service that started it."""


def check_bytes(
    found: bytes | bytearray | memoryview, wanted: bytes | bytearray | memoryview, what: str = "bytes"
) -> None:
    """Raise WrongBytes, which names the first place that differs."""
    if found == wanted:
        return
    found, wanted = bytes(found), bytes(wanted)
    shorter = min(len(found), len(wanted))
    at = next((i for i in range(shorter) if found[i] != wanted[i]), shorter)
    shown = slice(at, at + _SHOWN_NBYTES)
    sizes = f"{len(found)} bytes" if len(found) == len(wanted) else f"{len(found)} bytes instead of {len(wanted)}"
    difference = f"{found[shown].hex() or 'nothing'}, not {wanted[shown].hex() or 'nothing'}"
    raise WrongBytes(f"{what}: {sizes}; from byte {at}: {difference}")


def check_tokens(found: Sequence[object], wanted: Sequence[object], what: str = "tokens") -> None:
    """Raise WrongToken, which names the first place that differs. Both may be lists of whole answers."""
    if list(found) == list(wanted):
        return
    shorter = min(len(found), len(wanted))
    at = next((i for i in range(shorter) if found[i] != wanted[i]), shorter)
    difference = f"{list(found[at : at + 1])}, not {list(wanted[at : at + 1])}"
    raise WrongToken(f"{what}: {len(found)} instead of {len(wanted)}; at {at}: {difference}")


def check_no_process(alive: Sequence[object], what: str = "left behind") -> None:
    """Raise LeftoverProcess if any is alive."""
    if alive:
        raise LeftoverProcess(f"{what}: {', '.join(map(str, alive))}")
