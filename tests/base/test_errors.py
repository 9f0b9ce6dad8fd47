"""Errors cross the wire and come back as the same class, with what they carry."""

from __future__ import annotations

import re

import pytest

from moonpool.base import errors
from moonpool.base.errors import Internal, InvalidInput, MoonpoolError, Overloaded, from_wire
from moonpool.base.frames import HEADER_NBYTES
from moonpool.base.rpc.protocol import as_moonpool_error, decode_error, encode_error


def all_classes(root: type[MoonpoolError] = MoonpoolError) -> list[type[MoonpoolError]]:
    """Those a module keeps to itself (_Name) never cross the wire."""
    public = [child for child in root.__subclasses__() if not child.__name__.startswith("_")]
    return [root] + [found for child in public for found in all_classes(child)]


@pytest.mark.parametrize("cls", all_classes())
def test_round_trip(cls: type[MoonpoolError]) -> None:
    back = decode_error(encode_error(9, cls("what happened"))[HEADER_NBYTES:])
    assert type(back) is cls
    assert str(back) == "what happened"


def test_codes_are_unique_and_the_tree_is_documented() -> None:
    classes = all_classes()
    assert len({cls.code for cls in classes}) == len(classes)
    listed = re.findall(r"^ {4,}([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(cls.__name__ for cls in classes)


def test_extras_travel() -> None:
    overloaded = decode_error(encode_error(1, Overloaded("later", retry_after_s=2.5))[HEADER_NBYTES:])
    assert isinstance(overloaded, Overloaded)
    assert overloaded.retry_after_s == 2.5
    invalid = decode_error(encode_error(1, InvalidInput("no", param="top_p"))[HEADER_NBYTES:])
    assert isinstance(invalid, InvalidInput)
    assert invalid.param == "top_p"


def test_unknown_code_and_foreign_exceptions_are_internal() -> None:
    assert str(from_wire("from_the_future", "hm")) == "from_the_future: hm"
    mapped = as_moonpool_error(KeyError("x"))
    assert isinstance(mapped, Internal)
    assert "KeyError" in str(mapped)
