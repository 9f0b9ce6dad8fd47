"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError
from moonpool.base.units import exact_size, format_nbytes, parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GB", 2_000_000_000),
        ("2GiB", 2**31),
        (" 512 mib ", 2**29),
        ("1.5k", 1500),
        ("0", 0),
        ("7b", 7),
        ("1PB", 10**15),
        ("9007199254740993", 2**53 + 1),
        (12, 12),
    ],
)
def test_parse(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "2 parsecs", "-1GB", "1e9", "2GB 3", "1.GB", "٣GB", "nan", -5])
def test_bad_text(text: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_nbytes(text)


@given(st.integers(0, 2**60))
def test_plain_numbers_are_exact(nbytes: int) -> None:
    assert parse_nbytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1024, "1 kB"),
        (999_960, "1 MB"),
        (10**9, "1 GB"),
        (2**31, "2.1 GB"),
        (10**15, "1000 TB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize("typed", ["1GB", "512MB", "64GB", "4TB", "1.5kB", "999B"])
def test_a_size_is_shown_as_it_was_typed(typed: str) -> None:
    assert format_nbytes(parse_nbytes(typed)).replace(" ", "") == typed


@given(st.one_of(st.integers(0, 2**60), st.integers(0, 2**10).map(lambda n: n * 2**30), st.integers(0, 10**6)))
def test_an_exact_size_is_read_back(nbytes: int) -> None:
    assert parse_nbytes(exact_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0"), (64 * 10**9, "64GB"), (2**28, "256MiB"), (512_000_000, "512MB"), (1001, "1001")]
)
def test_an_exact_size_is_short(nbytes: int, text: str) -> None:
    assert exact_size(nbytes) == text
